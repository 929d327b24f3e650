"""The interface of a storage: small records of bytes, by profile, namespace and key.

A storage does not know sessions and does not interpret records. Every adapter guarantees:

- a change is durable when `put`, `delete`, `put_all` or `clear` returns;
- after a crash, a record is the complete old one or the complete new one; the records that one
  `put_all` writes are all old or all new;
- profiles, namespaces and keys are any strings: they come from users and from the network;
- calls are carried out in the order in which they were made, also those whose caller was cancelled.

A storage does not protect against two callers that read, change and write one record: see
`Records`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias, TypeVar

from .._errors import StorageError

__all__ = ["Changes", "Keys", "Namespace", "Storage"]

StorageT = TypeVar("StorageT", bound="Storage")

#: A key of 32 bytes, or several of them: the first one encrypts, all of them decrypt.
Keys: TypeAlias = bytes | Sequence[bytes]
#: The new values of records of a profile, by namespace and key; None deletes the record.
Changes: TypeAlias = Mapping[tuple[str, str], bytes | None]


class Namespace(StrEnum):
    """The usual namespaces; any other string is valid as well."""

    CREDS = "creds"
    SESSION = "session"
    SENDER_KEY = "sender_key"
    DEVICE_LIST = "device_list"
    ID_MAPPING = "id_mapping"
    APP_STATE = "app_state"


class Storage(ABC):
    """Records of bytes, by profile, namespace and key."""

    #: Whether records outlive the process.
    durable: bool = True

    async def open(self) -> None:  # noqa: B027 (not every storage has something to open)
        """Open the storage; does nothing if it is open. Raises `StorageError` with what to do."""

    async def close(self) -> None:  # noqa: B027
        """Close the storage after all calls before this one; does nothing if it is closed."""

    @abstractmethod
    async def new(self, profile: str) -> bool:
        """Create a profile without records; return False if it exists."""

    @abstractmethod
    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """Return the record, or None; raises `CorruptRecord` if it exists and cannot be read."""

    @abstractmethod
    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record, and create the profile if it does not exist."""

    @abstractmethod
    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Delete the record, if it exists; the profile stays."""

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and delete several records of a profile in one transaction.

        Raises `StorageError` if the storage has no transactions.
        """
        raise StorageError(
            f"{self!r} has no transactions over several records: use SQLite, files or memory, or "
            "implement put_all()"
        )

    @abstractmethod
    async def clear(self, profile: str) -> None:
        """Delete the profile and all its records in one transaction."""

    @abstractmethod
    async def list_profiles(self) -> list[str]:
        """Return all profiles, sorted."""

    @abstractmethod
    async def namespaces(self, profile: str) -> list[str]:
        """Return the namespaces in which the profile has a record, sorted."""

    @abstractmethod
    async def keys(self, profile: str, namespace: str) -> list[str]:
        """Return the keys of the profile's records in a namespace, sorted."""

    async def set_aside(self, profile: str, namespace: str, key: str) -> bool:
        """Copy a damaged record to where it is not overwritten; return False if unsupported."""
        return False

    async def __aenter__(self: StorageT) -> StorageT:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
