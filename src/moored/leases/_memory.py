"""A store in this process: for tests, and for services that run as one process.

Each client of `memory://` has a store of its own; all clients of `memory://NAME` share one.
"""

from __future__ import annotations

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

# Empty keys are removed when there are this many keys, or more.
_SWEEP_AT = 1000


@dataclass
class _StoredLease:
    """A lease as the store keeps it."""

    fence: int
    holder: Holder
    created_at: float
    expires: float


class _KeyLeases:
    """The leases of one key, by id, and their expiry times."""

    def __init__(self) -> None:
        self.live: dict[str, _StoredLease] = {}
        self._ends = TimeHeap()

    def put(self, lease_id: str, lease: _StoredLease) -> None:
        """Add a lease."""
        self.live[lease_id] = lease
        self._ends.set(lease_id, lease.expires)

    def extend(self, lease_id: str, expires: float) -> bool:
        """Extend a lease; False if there is none."""
        if (lease := self.live.get(lease_id)) is None:
            return False
        lease.expires = expires
        self._ends.set(lease_id, expires)
        return True

    def drop(self, lease_id: str) -> bool:
        """Remove a lease; False if there is none."""
        self._ends.drop(lease_id)
        return self.live.pop(lease_id, None) is not None

    def tidy(self, now: float) -> None:
        """Remove expired leases."""
        for ended in self._ends.pop(now):
            del self.live[ended]


class MemoryStore:
    """Leases and rate limits in memory, safe to use from several event loops and threads.

    It uses the monotonic clock, so changes of the wall clock have no effect.
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
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing; leases stay as they are."""

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None."""
        with self._lock:
            self._sweep()
            leases = self._leases_of(request.key)
            lease = leases.live.get(request.id)
            if lease is None:
                if len(leases.live) >= request.limit:
                    return None
                lease = self._new(request)
                leases.put(request.id, lease)
                self._keys[request.key] = leases
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
        return self._leases_of(request.key).extend(request.id, self._now() + request.ttl)

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live."""
        with self._lock:
            return [self._release(request) for request in requests]

    def _release(self, request: Request) -> bool:
        return self._leases_of(request.key).drop(request.id)

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
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
        """Return the live leases of one key, or of all keys."""
        with self._lock:
            keys = list(self._keys) if key is None else [key]
            now = self._now()
            return [
                Held(each, id_, lease.fence, lease.holder, lease.created_at, lease.expires - now)
                for each in keys
                for id_, lease in self._leases_of(each).live.items()
            ]

    def _leases_of(self, key: str) -> _KeyLeases:
        """Return the live leases of a key, after removing the expired ones."""
        leases = self._keys.get(key) or _KeyLeases()
        leases.tidy(self._now())
        return leases

    def _sweep(self) -> None:
        """Remove empty keys, each time that the number of keys has doubled since the last time."""
        if len(self._keys) + len(self._limits) < self._sweep_at:
            return
        now = self._now()
        self._keys = {key: leases for key in self._keys if (leases := self._leases_of(key)).live}
        self._limits = {key: at for key, at in self._limits.items() if at > now}
        self._sweep_at = max(_SWEEP_AT, 2 * (len(self._keys) + len(self._limits)))

    def __repr__(self) -> str:
        leases = sum(len(each.live) for each in self._keys.values())
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
