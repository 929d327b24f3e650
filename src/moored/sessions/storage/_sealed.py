"""A storage that wraps the records of another one in envelopes, checked at each read."""

from __future__ import annotations

from .._errors import CorruptRecord, StorageError
from ._seal import Names, Seal
from ._storage import Changes, Storage

__all__ = ["Sealed"]

#: The record that shows whether a key is right; no profile has this name.
MARKER: Names = ("", "seal", "marker")
ASIDE = ".corrupt"


class Sealed(Storage):
    """Another storage, with a checksum for each record, encrypted if the seal has a key.

    The names of profiles, namespaces and keys are not encrypted. A marker record shows whether the
    key is right: with a wrong key, `open` raises `CorruptRecord`, before any record is treated as
    missing and overwritten.
    """

    def __init__(self, inner: Storage, seal: Seal) -> None:
        self.inner = inner
        self.durable = inner.durable
        self._seal = seal

    async def open(self) -> None:
        """Open the storage, and check the key."""
        await self.inner.open()
        try:
            await self._check_key()
        except BaseException:
            await self.inner.close()
            raise

    async def close(self) -> None:
        """Close the storage inside."""
        await self.inner.close()

    async def new(self, profile: str) -> bool:
        """Make a profile; False if it is there already."""
        return await self.inner.new(_named(profile))

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None; raises `CorruptRecord` if it cannot be read."""
        names = (_named(profile), namespace, key)
        envelope = await self.inner.get(*names)
        return None if envelope is None else self._seal.open_envelope(names, envelope)

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record."""
        names = (_named(profile), namespace, key)
        await self.inner.put(*names, self._seal.close_envelope(names, value))

    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one."""
        await self.inner.delete(_named(profile), namespace, key)

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and remove several records in one transaction."""
        sealed: dict[tuple[str, str], bytes | None] = {}
        for (namespace, key), value in changes.items():
            names = (_named(profile), namespace, key)
            sealed[namespace, key] = (
                None if value is None else self._seal.close_envelope(names, value)
            )
        await self.inner.put_all(_named(profile), sealed)

    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records."""
        await self.inner.clear(_named(profile))

    async def list_profiles(self) -> list[str]:
        """All profiles, sorted."""
        return [profile for profile in await self.inner.list_profiles() if profile]

    async def namespaces(self, profile: str) -> list[str]:
        """The namespaces in which the profile has a record, sorted."""
        return await self.inner.namespaces(_named(profile))

    async def keys(self, profile: str, namespace: str) -> list[str]:
        """The keys of the profile's records in a namespace, sorted."""
        return await self.inner.keys(_named(profile), namespace)

    async def set_aside(self, profile: str, namespace: str, key: str) -> bool:
        """Copy a damaged record with its envelope to the namespace with the suffix `.corrupt`."""
        envelope = await self.inner.get(_named(profile), namespace, key)
        if envelope is None:
            return False
        await self.put(profile, namespace + ASIDE, key, envelope)
        return True

    def __repr__(self) -> str:
        return f"<Sealed {self.inner!r}, {self._seal!r}>"

    async def _check_key(self) -> None:
        # In this order: another process may be writing its first record, after the marker.
        profiles = await self.list_profiles() if self._seal.encrypts else []
        marker = await self.inner.get(*MARKER)
        if not self._seal.encrypts:
            if marker is not None:
                raise StorageError(f"{self.inner!r} is encrypted: pass the key")
            return
        if marker is None and profiles:
            raise StorageError(
                f"{self.inner!r} has records that are not encrypted: open it without a key, and "
                "copy its records to a new storage with the key"
            )
        try:
            current = marker is not None and self._seal.is_current(MARKER, marker)
        except CorruptRecord:
            raise CorruptRecord(
                f"{self.inner!r} was encrypted with another key than those given"
            ) from None
        if not current:
            await self.inner.put(*MARKER, self._seal.close_envelope(MARKER, b""))


def _named(profile: str) -> str:
    if not profile:
        raise ValueError("the name of a profile must not be empty")
    return profile
