"""The invariants of leases, checked by a model that sees every host and the store at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from moored.leases import Lease, LeaseLost, MemoryStore
from moored.testing import Host, Sim
from moored.testing._hosts import Process

__all__ = ["Claim", "Model"]

# How late a callback may be in virtual time: not at all, except for rounding.
EXACT = 1e-6


@dataclass(eq=False)
class Claim:
    """A lease that a host holds."""

    lease: Lease
    host: Host
    process: Process
    limit: int
    ended: bool = False
    told: LeaseLost | None = None
    told_at: float = 0.0
    #: When its host was last resumed after a pause.
    resumed_at: float = field(default=-1.0)

    @property
    def live(self) -> bool:
        """Whether its holder may use the lease now, by its own clock."""
        return not self.ended and self.process.alive and self.lease.live


class Model:
    """Checks the invariants; holders report to it."""

    def __init__(self, sim: Sim, store: MemoryStore) -> None:
        self.sim = sim
        self.store = store
        self.claims: list[Claim] = []
        self.grants = 0
        self.peak = 0
        self.told = 0
        self._fences: dict[str, int] = {}
        self._released: set[str] = set()
        self._watch_releases()

    # -- reports of the holders ----------------------------------------------------------------

    def begins(self, lease: Lease, host: Host, limit: int) -> Claim:
        """Record that a holder has acquired a lease."""
        claim = Claim(lease, host, host.process, limit)
        self.grants += 1
        self.claims.append(claim)
        if limit == 1:
            assert lease.fence > self._fences.get(lease.key, 0), "the fence did not grow"
            self._fences[lease.key] = lease.fence
        lease.on_lost(lambda error: self._told(claim, error))
        self.check()
        return claim

    def ends(self, claim: Claim) -> None:
        """Record that a holder is about to release its lease."""
        claim.ended = True

    def resumes(self, host: Host) -> None:
        """Record that a host is about to be resumed."""
        for claim in self.claims:
            if claim.host is host:
                claim.resumed_at = self.sim.now

    def _told(self, claim: Claim, error: LeaseLost) -> None:
        assert claim.told is None, "notified twice"
        claim.told, claim.told_at = error, self.sim.now
        self.told += 1
        if error.reason == "expired":
            latest = max(claim.lease.deadline, claim.resumed_at)
            assert self.sim.now <= latest + EXACT, "notified after the deadline"

    # -- the store -----------------------------------------------------------------------------

    def _watch_releases(self) -> None:
        release = self.store._release

        def watched(request: object) -> bool:
            known = request.id  # type: ignore[attr-defined]
            holders = [claim for claim in self.claims if claim.lease.id == known and claim.live]
            ended: bool = release(request)  # type: ignore[arg-type]
            if ended:
                assert not holders, "a lease was released under its holder"
                assert known not in self._released, "released twice"
                self._released.add(known)
            return ended

        self.store._release = watched  # type: ignore[method-assign]

    # -- invariants ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check all invariants now."""
        now = self.sim.now
        self.claims = [c for c in self.claims if c.process.alive and not c.ended and not _old(c)]
        in_use: dict[str, list[Claim]] = {}
        for claim in self.claims:
            if claim.live:
                in_use.setdefault(claim.lease.key, []).append(claim)
            elif claim.told is None and not claim.host.paused:
                late = now - max(claim.lease.deadline, claim.resumed_at)
                assert late <= EXACT, f"not notified {late:.3f} s after the deadline"
        for key, claims in in_use.items():
            self._check_key(key, claims)

    def _check_key(self, key: str, claims: list[Claim]) -> None:
        limit = claims[0].limit
        real = [claim for claim in claims if not claim.lease.local]
        self.peak = max(self.peak, len(real))
        assert len(real) <= limit, f"{len(real)} leases of {key} are live"
        there = self._in_store(key)
        for claim in real:
            assert claim.lease.id in there, "a holder relies on a lease that has ended"
        if len(real) < len(claims):
            assert limit > 1, "an exclusive lease is local"
            most = max(Counter(claim.host.name for claim in claims).values())
            assert most <= limit, f"{most} leases of {key} are live in one process"

    def _in_store(self, key: str) -> set[str]:
        now = self.store._now()
        leases = self.store._keys.get(key, {})
        return {known for known, lease in leases.items() if lease.expires > now}

    def local(self) -> int:
        """Return how many leases are local."""
        return sum(claim.live and claim.lease.local for claim in self.claims)

    async def watch(self, until: float, every: float) -> None:
        """Check the invariants regularly, until then."""
        while self.sim.now < until:
            self.check()
            await asyncio.sleep(every)


def _old(claim: Claim) -> bool:
    return claim.told is not None
