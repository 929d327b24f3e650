"""A lease store that records every lease, its loss, and the connection that holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from tests.leases.faulty_network import FaultyNetwork, NetworkFaults
from tests.sim.reservoir_database import Wire
from tests.sim.reservoir_violations import Violations

from moored.leases import Lease, LeaseLost, Leases, MemoryStore, Policy, Request
from moored.leases._memory import _StoredLease
from moored.testing import Sim

__all__ = ["CountedLeases", "Ledger"]


class Ledger(MemoryStore):
    """A store that records each lease and checks its release."""

    def __init__(self, sim: Sim, violations: Violations, weather: NetworkFaults) -> None:
        super().__init__(clock=sim.host("store").clock)
        self.granted: set[str] = set()
        #: Every lease that the client got, and the times at which leases were lost.
        self.leases: list[Lease] = []
        self.lost: dict[Lease, float] = {}
        self.wires: Iterable[Wire] = ()
        self.line = _Line(self, sim, weather, violations)
        self._violations = violations
        self._of_task: WeakKeyDictionary[asyncio.Task[object], Lease] = WeakKeyDictionary()

    def lease_of_task(self) -> Lease | None:
        """Return the last lease of the running task."""
        task = asyncio.current_task()
        return None if task is None else self._of_task.get(task)

    def got(self, lease: Lease) -> None:
        """Record a lease of the client."""
        task = asyncio.current_task()
        assert task is not None
        self._of_task[task] = lease
        self.leases.append(lease)
        lease.on_lost(lambda error: self._lose(lease, error))

    def _lose(self, lease: Lease, error: LeaseLost) -> None:
        self._violations.expect(lease not in self.lost, "a lease is lost twice")
        self.lost[lease] = self._violations.now

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
            self._violations.expect(not holders, f"the lease of {holders} was released too early")
        return ended

    def revoke(self, number: int) -> None:
        """End some leases, as an operator does; their holders notice at the next renewal."""
        for key, leases in list(self._keys.items()):
            for known in list(leases)[:number]:
                self._remove(key, known)

    def check_all_ended(self) -> None:
        """Check, after the close of the pool, that each lease was released or lost."""
        held = [lease for lease in self.leases if lease.live]
        self._violations.expect(not held, f"{len(held)} leases were never released")

    def check_none_left(self) -> None:
        """Check, after the close of the client, that the store is empty."""
        left = sum(len(self._leases_of(key)) for key in list(self._keys))
        self._violations.expect(not left, f"{left} leases are left in the store")


class CountedLeases(Leases):
    """The real client; records its leases in the ledger."""

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


class _Line(FaultyNetwork):
    """The connection to the store; checks that no lease is released again after its reply."""

    def __init__(
        self, store: MemoryStore, sim: Sim, weather: NetworkFaults, violations: Violations
    ) -> None:
        super().__init__(store, sim, weather)
        self._violations = violations
        self._given_back: set[str] = set()

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        for request in requests:
            self._violations.expect(request.id not in self._given_back, "a lease is released twice")
        answers = await super().release(requests)
        self._given_back |= {
            request.id for request, ended in zip(requests, answers, strict=True) if ended
        }
        return answers
