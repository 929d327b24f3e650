"""Leases with a ledger: what the store granted, what became of it, and whose connection it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from tests.leases.bad_line import BadLine, Weather
from tests.sim.reservoir_database import Wire
from tests.sim.reservoir_watch import Watch

from moored.leases import Lease, LeaseLost, Leases, MemoryStore, Policy, Request
from moored.leases._memory import _StoredLease
from moored.testing import Sim

__all__ = ["CountedLeases", "Ledger"]


class Ledger(MemoryStore):
    """A store that knows what each lease came to."""

    def __init__(self, sim: Sim, watch: Watch, weather: Weather) -> None:
        super().__init__(clock=sim.host("store").clock)
        self.granted: set[str] = set()
        #: Every lease that a client got, and when it was lost, if it was.
        self.leases: list[Lease] = []
        self.lost: dict[Lease, float] = {}
        self.wires: Iterable[Wire] = ()
        self.line = _Line(self, sim, weather, watch)
        self._watch = watch
        self._of_task: WeakKeyDictionary[asyncio.Task[object], Lease] = WeakKeyDictionary()

    def lease_of_task(self) -> Lease | None:
        """The lease that the running task got last."""
        task = asyncio.current_task()
        return None if task is None else self._of_task.get(task)

    def got(self, lease: Lease) -> None:
        """A client got a lease."""
        task = asyncio.current_task()
        assert task is not None
        self._of_task[task] = lease
        self.leases.append(lease)
        lease.on_lost(lambda error: self._lose(lease, error))

    def _lose(self, lease: Lease, error: LeaseLost) -> None:
        self._watch.expect(lease not in self.lost, "a lease is lost twice")
        self.lost[lease] = self._watch.now

    def _new(self, request: Request) -> _StoredLease:
        self.granted.add(request.id)
        return super()._new(request)

    def _release(self, request: Request) -> bool:
        ended = super()._release(request)
        if ended:
            holders = [
                wire
                for wire in self.wires
                if (lease := wire.lease) is not None
                and lease.id == request.id
                and lease.error is None
            ]
            self._watch.expect(not holders, f"the lease of {holders} was given back too early")
        return ended

    def revoke(self, number: int) -> None:
        """End some leases, as an operator does; their holders learn of it at the next renewal."""
        for room in self._keys.values():
            for known in list(room.live)[:number]:
                room.drop(known)

    def check_all_ended(self) -> None:
        """When the pool is closed: each lease was given back, or lost, and none is held."""
        held = [lease for lease in self.leases if lease.live]
        self._watch.expect(not held, f"{len(held)} leases were never given back")

    def check_none_left(self) -> None:
        """When the client is closed too: nothing is left in the store."""
        left = sum(len(self._leases_of(key).live) for key in list(self._keys))
        self._watch.expect(not left, f"{left} leases are left in the store")


class CountedLeases(Leases):
    """The real client, whose leases are written down."""

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        super().__init__(ledger.line, service_name="orders", policy=policy)
        self._ledger = ledger

    async def acquire(
        self, key: str, *, limit: int, ttl: float = 180.0, owner: str | None = None
    ) -> Lease | None:
        lease = await super().acquire(key, limit=limit, ttl=ttl, owner=owner)
        if lease is not None:
            self._ledger.got(lease)
        return lease


class _Line(BadLine):
    """The way to the store; sees what a client knows to be done, and does again."""

    def __init__(self, store: MemoryStore, sim: Sim, weather: Weather, watch: Watch) -> None:
        super().__init__(store, sim, weather)
        self._watch = watch
        self._given_back: set[str] = set()

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        for request in requests:
            self._watch.expect(request.id not in self._given_back, "a lease is given back twice")
        answers = await super().release(requests)
        self._given_back |= {
            request.id for request, ended in zip(requests, answers, strict=True) if ended
        }
        return answers
