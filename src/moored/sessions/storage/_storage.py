"""What must outlive a session: small records, by profile, namespace and key.

A storage is no process and knows no session. It keeps bytes: what is in them is the business of
whoever put them there. Every adapter holds to this:

- what `put`, `delete` and `clear` did is durable when they return;
- whatever happens meanwhile, a record is the old one or the new one, and whole; and of several
  that `put_all` writes, all are the old ones or all are the new ones;
- profiles, namespaces and keys are any text: they come from users and from the network;
- calls that were made one after the other are carried out in that order, even if whoever made one
  has given up waiting for it.

There is nothing here against two that read, change and write one record: see `Records` for that.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from .._errors import StorageError

__all__ = ["Changes", "Keys", "Namespace", "Storage", "open_storage"]

StorageT = TypeVar("StorageT", bound="Storage")

#: 32 bytes, or a passphrase, or several of them: the first one writes, all of them read.
Keys: TypeAlias = bytes | str | Sequence[bytes | str]
#: Records of a profile by namespace and key: what each shall be, or None for no record.
Changes: TypeAlias = Mapping[tuple[str, str], bytes | None]


class Namespace(StrEnum):
    """The namespaces that sessions use; any other text is as good."""

    CREDS = "creds"
    SESSION = "session"
    SENDER_KEY = "sender_key"
    DEVICE_LIST = "device_list"
    ID_MAPPING = "id_mapping"
    APP_STATE = "app_state"


class Storage(ABC):
    """Records of bytes, by profile, namespace and key."""

    #: Whether what is kept there outlives the process.
    durable: bool = True

    async def open(self) -> None:  # noqa: B027 (not every storage has something to open)
        """Make it ready; raises `StorageError` that says what to do. Nothing, if it is open."""

    async def close(self) -> None:  # noqa: B027
        """Let go of it, after everything that was asked for is done. Nothing, if it is closed."""

    @abstractmethod
    async def new(self, profile: str) -> bool:
        """Make a profile, which then exists without a record; False if it is there already."""

    @abstractmethod
    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None; raises `CorruptRecord` if it is there and cannot be read."""

    @abstractmethod
    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record, and make the profile if there is none."""

    @abstractmethod
    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one; the profile stays."""

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and remove several records of a profile in one transaction: all of it, or nothing.

        Raises `StorageError` if the storage cannot do that.
        """
        raise StorageError(
            f"{self!r} has no transactions over several records: use SQLite, files or memory, or "
            "implement put_all()"
        )

    @abstractmethod
    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records at once."""

    @abstractmethod
    async def list_profiles(self) -> list[str]:
        """All profiles, sorted."""

    @abstractmethod
    async def namespaces(self, profile: str) -> list[str]:
        """The namespaces in which the profile has a record, sorted."""

    @abstractmethod
    async def keys(self, profile: str, namespace: str) -> list[str]:
        """The keys of the profile's records in a namespace, sorted."""

    async def set_aside(self, profile: str, namespace: str, key: str) -> bool:
        """Copy a damaged record to where nobody overwrites it; False if that cannot be done."""
        return False

    async def __aenter__(self: StorageT) -> StorageT:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def open_storage(
    where: str | os.PathLike[str] | Storage,
    *,
    key: Keys | None = None,
    accept_plain: bool = False,
) -> Storage:
    """The storage that is meant, to be opened with `async with`.

    `"accounts.db"` or a path is a SQLite database, `"files:DIR"` or a directory that exists is a
    directory of files, `"memory:"` is gone with the process. What is kept there has a checksum,
    and with a key it is encrypted (see `Seal`). A storage of your own is taken as it is, or with
    a key, encrypted.
    """
    # Here, because the adapters import this module.
    from ._seal import Seal
    from ._sealed import Sealed

    inner = where if isinstance(where, Storage) else _adapter(where)
    if isinstance(where, Storage) and key is None:
        return where
    if isinstance(where, Sealed):
        raise StorageError(f"{where!r} is sealed already: give the key to the one inside it")
    return Sealed(inner, Seal(key, accept_plain=accept_plain))


def _adapter(where: str | os.PathLike[str]) -> Storage:
    from ._files import FileStorage
    from ._memory import MemoryStorage
    from ._sqlite import SqliteStorage

    if not isinstance(where, str):
        path = Path(where)
        return FileStorage(path) if path.is_dir() else SqliteStorage(path)
    scheme, colon, rest = where.partition(":")
    if where == "memory:":
        return MemoryStorage()
    if colon and scheme == "files" and rest:
        return FileStorage(Path(rest))
    mistake = _mistake(where, scheme, rest if colon else "")
    if mistake:
        # Of an address nothing more is shown: it may have a password in it.
        shown = f"{scheme}://…" if rest.startswith("//") else where
        raise StorageError(
            f"storage {shown!r}: {mistake}. Write the path of a SQLite database, as in "
            "'accounts.db', 'files:DIR' for a directory of files, or 'memory:'"
        )
    return _adapter(Path(where))


def _mistake(where: str, scheme: str, rest: str) -> str:
    if not where.strip():
        return "this names nothing"
    if where == ":memory:" or scheme == "memory":
        return "what is kept in memory is called 'memory:', and has no name"
    if where == "files:":
        return "the directory is missing"
    if rest.startswith("//"):
        return f"there is no storage for {scheme}://"
    if where.endswith("/") and not Path(where).is_dir():
        return "there is no such directory, and a database cannot have this name"
    return ""
