"""The storages on which the tests of the storage contract run."""

from __future__ import annotations

from pathlib import Path

from moored.sessions import StorageError
from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._open import open_storage
from moored.sessions.storage._seal import Seal
from moored.sessions.storage._sealed import Sealed
from moored.sessions.storage._sqlite import SqliteStorage
from moored.sessions.storage._storage import Storage

__all__ = ["KEY", "KINDS", "KINDS_ON_DISK", "FullStorage", "make"]

KEY = bytes(range(32))
KINDS_ON_DISK = ("sqlite", "files", "checked sqlite", "encrypted sqlite", "encrypted files")
KINDS = ("memory", "checked memory", *KINDS_ON_DISK)


def make(kind: str, directory: Path) -> Storage:
    """Make a storage of a kind in a directory."""
    match kind:
        case "memory":
            return MemoryStorage()
        case "sqlite":
            return SqliteStorage(directory / "accounts.db")
        case "files":
            return FileStorage(directory / "accounts")
        case "checked memory":
            return open_storage("memory:")
        case "checked sqlite":
            return open_storage(directory / "accounts.db")
        case "encrypted sqlite":
            return open_storage(str(directory / "accounts.db"), key=KEY)
        case "encrypted files":
            return Sealed(FileStorage(directory / "accounts"), Seal(KEY))
    raise ValueError(kind)


class FullStorage(MemoryStorage):
    """A storage that refuses writes while `full` is set."""

    durable = True
    full = True

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        if self.full:
            raise StorageError("no room")
        await super().put(profile, namespace, key, value)
