"""A store in this process: for tests, and for services that run as one process.

Each client of `memory://` has a store of its own; all clients of `memory://NAME` share one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from moored.kernel import Clock, at_fork

from . import _gcra
from ._store import Grant, Held, Holder, Request, Taken
from ._time_heap import TimeHeap
from ._url import parse
from ._url_parameters import UrlParameters

__all__ = ["MemoryStore", "open_store"]


@dataclass
class _StoredLease:
    """A lease as the store keeps it."""

    fence: int
    holder: Holder
    created_at: float
    expires: float


class MemoryStore:
    """Leases and rate limits in memory, safe to use from several event loops and threads.

    It uses the monotonic clock, so changes of the wall clock have no effect.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or Clock.system()
        self._lock = threading.Lock()
        # The leases of each key that has some, by id.
        self._keys: dict[str, dict[str, _StoredLease]] = {}
        # When each lease expires, by key and id; and when each rate limit is full again.
        self._ends = TimeHeap[tuple[str, str]]()
        self._limits = TimeHeap[str]()
        self._fence = 0

    def _now(self) -> float:
        return self._clock.monotonic()

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing; leases stay as they are."""

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None."""
        with self._lock:
            leases = self._leases_of(request.key)
            lease = leases.get(request.id)
            if lease is None:
                if len(leases) >= request.limit:
                    return None
                lease = self._keys.setdefault(request.key, leases)[request.id] = self._new(request)
                self._ends.set((request.key, request.id), lease.expires)
            return Grant(request.id, lease.fence)

    def _new(self, request: Request) -> _StoredLease:
        # One counter for all keys: it grows for each key, and no state per key is needed.
        self._fence += 1
        expires = self._now() + request.ttl
        return _StoredLease(self._fence, request.holder, self._clock.wall(), expires)

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live."""
        with self._lock:
            return [self._renew(request) for request in requests]

    def _renew(self, request: Request) -> bool:
        if (lease := self._leases_of(request.key).get(request.id)) is None:
            return False
        lease.expires = self._now() + request.ttl
        self._ends.set((request.key, request.id), lease.expires)
        return True

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        with self._lock:
            return [self._release(request) for request in requests]

    def _release(self, request: Request) -> bool:
        live = request.id in self._leases_of(request.key)
        if live:
            self._remove(request.key, request.id)
        return live

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
        with self._lock:
            now = self._now()
            self._limits.pop(now)
            known = self._limits.get(key)  # infinity: it is not stored, because it is full
            full_at, taken = _gcra.take(
                None if known == math.inf else known, now, rate=rate, burst=burst, tokens=tokens
            )
            self._limits.set(key, full_at)
            return taken

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key, or of all keys."""
        with self._lock:
            now = self._now()
            self._tidy()
            return [
                Held(each, id_, lease.fence, lease.holder, lease.created_at, lease.expires - now)
                for each in (list(self._keys) if key is None else [key])
                for id_, lease in self._leases_of(each).items()
            ]

    def _leases_of(self, key: str) -> dict[str, _StoredLease]:
        """Return the live leases of a key, by id."""
        self._tidy()
        return self._keys.get(key, {})

    def _tidy(self) -> None:
        """Remove the expired leases of all keys."""
        for key, lease_id in self._ends.pop(self._now()):
            self._remove(key, lease_id)

    def _remove(self, key: str, lease_id: str) -> None:
        self._ends.drop((key, lease_id))
        del self._keys[key][lease_id]
        if not self._keys[key]:
            del self._keys[key]

    def __repr__(self) -> str:
        leases = sum(map(len, self._keys.values()))
        return f"<MemoryStore: {leases} leases of {len(self._keys)} keys>"


_named: dict[str, MemoryStore] = {}
# A forked child has only copies: leases that it does not renew, and a lock that may be held.
at_fork(after_in_child=_named.clear)


def open_store(url: str, *, clock: Clock) -> MemoryStore:
    """Return the store of a `memory://` URL."""
    parsed = parse(url)
    UrlParameters(parsed).done()
    if not parsed.host:
        return MemoryStore(clock=clock)
    return _named.setdefault(parsed.host, MemoryStore(clock=clock))
