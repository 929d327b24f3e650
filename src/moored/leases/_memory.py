"""A store in this process: for tests, and for services that are one process.

`memory://` is a store of its own; all clients of `memory://NAME` in a process share one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from moored.kernel import Clock

from . import _gcra
from ._store import Grant, Held, Holder, Request, Taken
from ._time_heap import TimeHeap
from ._url import parse

__all__ = ["MemoryStore", "open_store"]

# How many keys there may be before those with nothing in them are looked for.
_SWEEP_AT = 1000


@dataclass
class _StoredLease:
    """A lease as the store keeps it."""

    fence: int
    holder: Holder
    created_at: float
    expires: float


class _KeyLeases:
    """The leases of one key, and when they end."""

    def __init__(self) -> None:
        self.live: dict[str, _StoredLease] = {}
        self._ends = TimeHeap()

    def put(self, known: str, lease: _StoredLease) -> None:
        """A new lease."""
        self.live[known] = lease
        self._ends.set(known, lease.expires)

    def extend(self, known: str, expires: float) -> bool:
        """A lease lives on; False if there is none."""
        if (lease := self.live.get(known)) is None:
            return False
        lease.expires = expires
        self._ends.set(known, expires)
        return True

    def drop(self, known: str) -> bool:
        """A lease ends before its time; False if there is none."""
        self._ends.drop(known)
        return self.live.pop(known, None) is not None

    def tidy(self, now: float) -> None:
        """Forget what has ended."""
        for ended in self._ends.pop(now):
            del self.live[ended]


class MemoryStore:
    """Leases and rate limits in a dictionary, safe to use from several loops and threads.

    Its time is the clock's monotonic one, so steps of the wall clock change nothing.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or Clock.system()
        self._lock = threading.Lock()
        self._keys: dict[str, _KeyLeases] = {}
        self._limits: dict[str, float] = {}
        self._fence = 0
        self._sweep_at = _SWEEP_AT

    def _now(self) -> float:
        return self._clock.monotonic()

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do: leases stay as they are."""

    async def acquire(self, request: Request) -> Grant | None:
        """Give a lease if fewer than the limit live, else None."""
        with self._lock:
            self._sweep()
            room = self._leases_of(request.key)
            lease = room.live.get(request.id)
            if lease is None:
                if len(room.live) >= request.limit:
                    return None
                lease = self._new(request)
                room.put(request.id, lease)
                self._keys[request.key] = room
            return Grant(request.id, lease.fence)

    def _new(self, request: Request) -> _StoredLease:
        # One number for all keys: it grows for each of them, and nothing is kept per key.
        self._fence += 1
        expires = self._now() + request.ttl
        return _StoredLease(self._fence, request.holder, self._clock.wall(), expires)

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases by their ttl from now; False for each that does not live any more."""
        with self._lock:
            return [self._renew(request) for request in requests]

    def _renew(self, request: Request) -> bool:
        return self._leases_of(request.key).extend(request.id, self._now() + request.ttl)

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that did not live."""
        with self._lock:
            return [self._release(request) for request in requests]

    def _release(self, request: Request) -> bool:
        return self._leases_of(request.key).drop(request.id)

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with at most `burst` at once."""
        with self._lock:
            self._sweep()
            self._limits[key], taken = _gcra.take(
                self._limits.get(key),
                self._now(),
                rate=rate,
                burst=burst,
                tokens=tokens,
            )
            return taken

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases, of one key or of all."""
        with self._lock:
            keys = list(self._keys) if key is None else [key]
            now = self._now()
            return [
                Held(each, known, lease.fence, lease.holder, lease.created_at, lease.expires - now)
                for each in keys
                for known, lease in self._leases_of(each).live.items()
            ]

    def _leases_of(self, key: str) -> _KeyLeases:
        """The live leases of a key; the others are forgotten here, and nowhere else."""
        room = self._keys.get(key) or _KeyLeases()
        room.tidy(self._now())
        return room

    def _sweep(self) -> None:
        """Forget keys with nothing in them, each time that there are twice as many as were left."""
        if len(self._keys) + len(self._limits) < self._sweep_at:
            return
        now = self._now()
        self._keys = {key: room for key in self._keys if (room := self._leases_of(key)).live}
        self._limits = {key: at for key, at in self._limits.items() if at > now}
        self._sweep_at = max(_SWEEP_AT, 2 * (len(self._keys) + len(self._limits)))

    def __repr__(self) -> str:
        leases = sum(len(room.live) for room in self._keys.values())
        return f"<MemoryStore: {leases} leases of {len(self._keys)} keys>"


_named: dict[str, MemoryStore] = {}
# What a child inherits by a fork is a copy: leases that nobody renews, a lock that may be held.
os.register_at_fork(after_in_child=_named.clear)


def open_store(url: str, *, clock: Clock) -> MemoryStore:
    """The store of a `memory://` URL."""
    name = parse(url).check().host
    if not name:
        return MemoryStore(clock=clock)
    return _named.setdefault(name, MemoryStore(clock=clock))
