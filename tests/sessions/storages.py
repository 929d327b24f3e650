"""The storages that all tests of the contract run on."""

from __future__ import annotations

from pathlib import Path

from moored.sessions import StorageError
from moored.sessions.storage._files import FileStorage
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._seal import Seal
from moored.sessions.storage._sealed import Sealed
from moored.sessions.storage._sqlite import SqliteStorage
from moored.sessions.storage._storage import Storage, open_storage

__all__ = ["KEY", "KINDS", "KINDS_ON_DISK", "Full", "make"]

KEY = bytes(range(32))
KINDS_ON_DISK = ("sqlite", "files", "checked sqlite", "encrypted sqlite", "encrypted files")
KINDS = ("memory", "checked memory", *KINDS_ON_DISK)


def make(kind: str, place: Path) -> Storage:
    """A storage of a kind, for what is at a place."""
    match kind:
        case "memory":
            return MemoryStorage()
        case "sqlite":
            return SqliteStorage(place / "accounts.db")
        case "files":
            return FileStorage(place / "accounts")
        case "checked memory":
            return open_storage("memory:")
        case "checked sqlite":
            return open_storage(place / "accounts.db")
        case "encrypted sqlite":
            return open_storage(str(place / "accounts.db"), key=KEY)
        case "encrypted files":
            return Sealed(FileStorage(place / "accounts"), Seal(KEY))
    raise ValueError(kind)


class Full(MemoryStorage):
    """A storage that has no room for a while."""

    durable = True
    full = True

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        if self.full:
            raise StorageError("no room")
        await super().put(profile, namespace, key, value)
