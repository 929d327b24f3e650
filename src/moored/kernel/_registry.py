"""Names for live things: unique keys, freed with their owner, with monitors and lasting handles.

Invariants:

- a key has at most one live owner;
- a key is free again before a supervisor starts the owner's successor;
- a monitor gives exactly one `Down`;
- nothing is kept for a key that nobody owns, monitors or waits for.

Uniqueness reaches as far as the process. For a whole cluster, hold an exclusive lease for the key
while it is registered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ._errors import AlreadyRegistered, NotRegistered
from ._ownership import Owned, Reason, current_owner, when_ended

__all__ = ["Down", "Registration", "Registry", "Via"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Down:
    """The owner of a key has ended, or gave the key up.

    `reason` is "normal", "shutdown", "unregistered", "unknown" (nobody owned the key when the
    monitor was made) or the exception that ended the owner.
    """

    key: Hashable
    reason: Reason | str


class Registration(Generic[K, V]):
    """The right to a key, as long as its owner lives; `unregister()` gives it up early."""

    __slots__ = ("_down", "_owned", "_registry", "key", "value")

    def __init__(self, registry: Registry[K, V], key: K, value: V) -> None:
        self._registry = registry
        self._owned: Owned | None = None
        self._down: list[asyncio.Future[Down]] | None = None
        self.key = key
        self.value = value

    def unregister(self) -> None:
        """Free the key; harmless when it is free already or belongs to a successor."""
        if self._owned is not None:
            self._owned.remove(self._owner_ended)
        self._registry._free(self, "unregistered")

    def _owner_ended(self, reason: Reason) -> None:
        self._registry._free(self, reason)

    def __repr__(self) -> str:
        live = "live" if self._registry._entries.get(self.key) is self else "ended"
        return f"<Registration {self.key!r} {live}>"


class Registry(Generic[K, V]):
    """Unique keys for live values. All of it runs on one event loop, so each call is atomic."""

    def __init__(self, name: str = "registry") -> None:
        self.name = name
        self._entries: dict[K, Registration[K, V]] = {}
        self._arrivals: dict[K, list[asyncio.Future[V]]] = {}

    def register(
        self, key: K, value: V, *, owner: asyncio.Task[Any] | None = None
    ) -> Registration[K, V]:
        """Take a key for as long as the owner (the running task unless given) lives.

        Raises `AlreadyRegistered`, which carries the current value, when the key has a live owner.
        """
        current = self._entries.get(key)
        if current is not None:
            raise AlreadyRegistered(key, current.value)
        registration = Registration(self, key, value)
        registration._owned = when_ended(owner or current_owner(), registration._owner_ended)
        self._entries[key] = registration
        for waiter in self._arrivals.pop(key, ()):
            if not waiter.done():
                waiter.set_result(value)
        return registration

    def unregister(self, key: K) -> None:
        """Free a key whoever owns it; harmless when nobody does."""
        if (registration := self._entries.get(key)) is not None:
            registration.unregister()

    def whereis(self, key: K) -> V | None:
        """The value that the key's live owner registered, or None."""
        registration = self._entries.get(key)
        return None if registration is None else registration.value

    def via(self, key: K) -> Via[K, V]:
        """A handle that looks the key up at each use, so that it survives restarts of the owner."""
        return Via(self, key)

    def monitor(self, key: K) -> asyncio.Future[Down]:
        """A future that becomes exactly one `Down` when the current owner of the key ends.

        When nobody owns the key it is done at once, with the reason "unknown". Cancel it to stop
        watching.
        """
        down: asyncio.Future[Down] = asyncio.get_running_loop().create_future()
        registration = self._entries.get(key)
        if registration is None:
            down.set_result(Down(key, "unknown"))
            return down
        watchers = registration._down
        if watchers is None:
            watchers = registration._down = []
        watchers.append(down)
        down.add_done_callback(lambda done: _discard(watchers, done))
        return down

    async def wait_for(self, key: K) -> V:
        """The key's value, as soon as it has a live owner."""
        registration = self._entries.get(key)
        if registration is not None:
            return registration.value
        arrival: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        waiters = self._arrivals.setdefault(key, [])
        waiters.append(arrival)
        try:
            return await arrival
        finally:
            _discard(waiters, arrival)
            if not waiters and self._arrivals.get(key) is waiters:
                del self._arrivals[key]

    def items(self) -> list[tuple[K, V]]:
        """Every key and its value, as they are now."""
        return [(key, registration.value) for key, registration in self._entries.items()]

    def _free(self, registration: Registration[K, V], reason: Reason | str) -> None:
        if self._entries.get(registration.key) is not registration:
            return
        del self._entries[registration.key]
        for down in list(registration._down or ()):
            if not down.done():
                down.set_result(Down(registration.key, reason))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Registry {self.name}: {len(self)} registered, {len(self._arrivals)} awaited>"


class Via(Generic[K, V]):
    """A handle to whoever owns a key at the moment of use."""

    __slots__ = ("key", "registry")

    def __init__(self, registry: Registry[K, V], key: K) -> None:
        self.registry = registry
        self.key = key

    def resolve(self) -> V:
        """The value now; raises `NotRegistered` while the key has no live owner."""
        registration = self.registry._entries.get(self.key)
        if registration is None:
            raise NotRegistered(self.key)
        return registration.value

    async def wait(self, timeout: float | None = None) -> V:
        """The value as soon as there is one; raises `NotRegistered` after the timeout."""
        try:
            async with asyncio.timeout(timeout):
                return await self.registry.wait_for(self.key)
        except TimeoutError:
            raise NotRegistered(self.key) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Via):
            return NotImplemented
        return self.registry is other.registry and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash((id(self.registry), self.key))

    def __repr__(self) -> str:
        state = "registered" if self.key in self.registry else "not registered now"
        return f"<Via {self.key!r} {state}>"


def _discard(waiters: list[Any], item: Any) -> None:
    try:
        waiters.remove(item)
    except ValueError:
        pass  # it has been told already
