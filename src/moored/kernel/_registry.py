"""A registry of live objects: unique keys that are freed when their owner ends.

Invariants:

- a key has at most one live owner;
- a key is free again before a supervisor starts the owner's successor;
- a monitor gives exactly one `Down`;
- nothing is kept for a key without an owner, a monitor or a waiter.

Keys are unique within the process. For a whole cluster, hold an exclusive lease for the key while
it is registered here.
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
    """Reports that the owner of a key has ended, or has unregistered the key.

    `reason` is "normal", "shutdown", "unregistered", "unknown" (the key had no owner when the
    monitor was made) or the exception that ended the owner.
    """

    key: Hashable
    reason: Reason | str


@dataclass(slots=True, eq=False, repr=False)
class Registration(Generic[K, V]):
    """The registration of a key, until its owner ends or `unregister()` is called."""

    _registry: Registry[K, V]
    key: K
    value: V
    _owned: Owned | None = None
    _down: list[asyncio.Future[Down]] | None = None

    def unregister(self) -> None:
        """Free the key; harmless if it is free already or registered by another owner."""
        if self._owned is not None:
            self._owned.remove(self._owner_ended)
        self._registry._free(self, "unregistered")

    def _owner_ended(self, reason: Reason) -> None:
        self._registry._free(self, reason)

    def __repr__(self) -> str:
        live = "live" if self._registry._entries.get(self.key) is self else "ended"
        return f"<Registration {self.key!r} {live}>"


class Registry(Generic[K, V]):
    """Unique keys for live values. Use it from one event loop, where each call is atomic."""

    def __init__(self, name: str = "registry") -> None:
        self.name = name
        self._entries: dict[K, Registration[K, V]] = {}
        self._arrivals: dict[K, list[asyncio.Future[V]]] = {}

    def register(
        self, key: K, value: V, *, owner: asyncio.Task[Any] | None = None
    ) -> Registration[K, V]:
        """Register a key until the owner, by default the running task, ends.

        Raises `AlreadyRegistered`, which carries the current value, if the key has a live owner.
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
        """Free a key, whichever task owns it; harmless if it is free."""
        if (registration := self._entries.get(key)) is not None:
            registration.unregister()

    def whereis(self, key: K) -> V | None:
        """Return the value that the key's live owner registered, or None."""
        registration = self._entries.get(key)
        return None if registration is None else registration.value

    def via(self, key: K) -> Via[K, V]:
        """Return a handle that looks the key up at each use, so that it survives restarts."""
        return Via(self, key)

    def monitor(self, key: K) -> asyncio.Future[Down]:
        """Return a future whose result is a `Down` when the current owner of the key ends.

        If the key has no owner, it is done at once, with the reason "unknown". Cancel the future to
        stop monitoring.
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
        """Wait until the key has a live owner, and return its value."""
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
        """Return every registered key and its value."""
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


@dataclass(frozen=True, slots=True, repr=False)
class Via(Generic[K, V]):
    """A handle that finds the current owner of a key at each use."""

    registry: Registry[K, V]
    key: K

    def resolve(self) -> V:
        """Return the current value; raises `NotRegistered` if the key has no live owner."""
        registration = self.registry._entries.get(self.key)
        if registration is None:
            raise NotRegistered(self.key)
        return registration.value

    async def wait(self, timeout: float | None = None) -> V:
        """Wait for an owner and return its value; raises `NotRegistered` after the timeout."""
        try:
            async with asyncio.timeout(timeout):
                return await self.registry.wait_for(self.key)
        except TimeoutError:
            raise NotRegistered(self.key) from None

    def __repr__(self) -> str:
        state = "registered" if self.key in self.registry else "not registered now"
        return f"<Via {self.key!r} {state}>"


def _discard(waiters: list[Any], item: Any) -> None:
    try:
        waiters.remove(item)
    except ValueError:
        pass  # it was notified and removed already
