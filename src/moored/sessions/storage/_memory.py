"""A storage in memory, for tests and for accounts that need not outlive the process."""

from __future__ import annotations

from moored.kernel import counted

from ._storage import Changes, Storage

__all__ = ["MemoryStorage"]


class MemoryStorage(Storage):
    """Records in this object; `open` and `close` do nothing."""

    durable = False

    def __init__(self) -> None:
        self._profiles: dict[str, dict[str, dict[str, bytes]]] = {}

    async def new(self, profile: str) -> bool:
        """Make a profile; False if it is there already."""
        if profile in self._profiles:
            return False
        self._profiles[profile] = {}
        return True

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        """The record, or None."""
        return self._profiles.get(profile, {}).get(namespace, {}).get(key)

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        """Write the record."""
        self._profiles.setdefault(profile, {}).setdefault(namespace, {})[key] = bytes(value)

    async def delete(self, profile: str, namespace: str, key: str) -> None:
        """Remove the record, if there is one."""
        records = self._profiles.get(profile, {})
        found = records.get(namespace, {})
        found.pop(key, None)
        if not found:
            records.pop(namespace, None)

    async def put_all(self, profile: str, changes: Changes) -> None:
        """Write and remove several records at once."""
        for (namespace, key), value in changes.items():
            if value is None:
                await self.delete(profile, namespace, key)
            else:
                await self.put(profile, namespace, key, value)

    async def clear(self, profile: str) -> None:
        """Remove the profile and all its records."""
        self._profiles.pop(profile, None)

    async def list_profiles(self) -> list[str]:
        """All profiles, sorted."""
        return sorted(self._profiles)

    async def namespaces(self, profile: str) -> list[str]:
        """The namespaces in which the profile has a record, sorted."""
        return sorted(self._profiles.get(profile, {}))

    async def keys(self, profile: str, namespace: str) -> list[str]:
        """The keys of the profile's records in a namespace, sorted."""
        return sorted(self._profiles.get(profile, {}).get(namespace, {}))

    def __repr__(self) -> str:
        return f"<MemoryStorage: {counted(len(self._profiles), 'profile')}>"
