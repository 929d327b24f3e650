"""Callers of a pool, with timeouts, cancellations and errors, and what the pool owes to each."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass, field

from tests.sim.reservoir_database import Database, Refused, Wire
from tests.sim.reservoir_ledger import Ledger
from tests.sim.reservoir_violations import EXACT, Violations

from moored.reservoir import AsyncConnectionPool, PoolClosed, PoolOverloaded, PoolTimeout
from moored.reservoir._driver import PING_TIMEOUT
from moored.testing import Sim

__all__ = ["Callers", "Visit"]


class CallerError(Exception):
    """Raised by the code of a caller while it holds a connection."""


@dataclass(eq=False)
class Visit:
    """One checkout: its random plan, and what happened."""

    number: int
    timeout: float
    hold: float
    cancel_after: float
    raises: bool
    by_hand: bool
    arrived: float = 0.0
    #: Whether the caller had to open the pool; it starts to wait after that.
    opens: bool = False
    #: The order of arrival, from 1; and the times at which the caller was served and left.
    place: int = 0
    served: float = math.inf
    ended: float = math.inf
    cancelled: float = math.inf
    #: How often the caller was given a connection to ping first, and the last of them.
    looks: int = 0
    looked_at: Wire | None = None
    got: Wire | None = None
    outcome: str = ""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def waits(self) -> bool:
        """Whether the caller still waits: it has no connection, not even one to ping."""
        assert self.task is not None
        got = self.looks or self.served < math.inf
        return self.place > 0 and not got and not self.task.done()

    @property
    def lost_its_place(self) -> bool:
        """Whether the caller had to queue again, because its first connection was useless."""
        return self.opens or self.looks > 1 or self.looked_at not in (None, self.got)

    def __str__(self) -> str:
        return f"caller {self.number}"


class Callers:
    """All callers of the pool."""

    def __init__(
        self,
        sim: Sim,
        violations: Violations,
        pool: AsyncConnectionPool[Wire],
        database: Database,
        ledger: Ledger,
    ) -> None:
        self.visits: list[Visit] = []
        self._sim = sim
        self._violations = violations
        self._pool = pool
        self._database = database
        self._ledger = ledger
        self._places = itertools.count(1)
        self._by_task: dict[asyncio.Task[None] | None, Visit] = {}
        database.on_ping = self._pinged

    # -- arrival -------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Start a caller with a random plan."""
        rng = self._sim.rng
        soon, later = 0.3 * rng.random(), rng.random()
        visit = Visit(
            number=len(self.visits) + 1,
            timeout=rng.choice((0.0, 0.05, 0.5, 2.0, 5.0)),
            hold=rng.choice((0.0, 0.01, 0.2, 0.5, 1.5)) * rng.random(),
            cancel_after=rng.choice((math.inf, math.inf, math.inf, 0.0, soon, later)),
            raises=rng.random() < 0.1,
            by_hand=rng.random() < 0.3,
        )
        self._start(visit)

    async def is_served(self, patience: float) -> bool:
        """Whether a caller that is never cancelled gets a connection within `patience` seconds."""
        ends = self._sim.now + patience
        while self._sim.now < ends:
            visit = Visit(len(self.visits) + 1, patience, 0.0, math.inf, False, False)
            await asyncio.wait([self._start(visit)])
            if visit.served < math.inf:
                return True
            await asyncio.sleep(0.5)  # refused, because others had waited for too long
        return False

    def _start(self, visit: Visit) -> asyncio.Task[None]:
        self.visits.append(visit)
        visit.task = self._sim.loop.create_task(self._run(visit), name=str(visit))
        if visit.cancel_after < math.inf:
            self._sim.after(visit.cancel_after, self._cancel, visit)
        return visit.task

    def _cancel_first_waiter(self) -> None:
        """Cancel the first waiter in the turn in which it is served."""
        if waiting := self.waiting():
            self._sim.loop.call_soon(self._cancel, waiting[0])

    def _cancel(self, visit: Visit) -> None:
        assert visit.task is not None
        if not visit.task.done():
            visit.cancelled = self._sim.now
            visit.task.cancel()

    async def _run(self, visit: Visit) -> None:
        self._by_task[visit.task] = visit
        visit.arrived, visit.place = self._sim.now, next(self._places)
        visit.opens = self._pool.reservoir.state == "new"
        try:
            await self._visit(visit)
            visit.outcome = "done"
        except (PoolTimeout, PoolClosed, PoolOverloaded, CallerError, Refused) as error:
            visit.outcome = type(error).__name__
        except asyncio.CancelledError:
            visit.outcome = "cancelled"
        finally:
            visit.ended = self._sim.now
        self._check_end(visit)

    async def _visit(self, visit: Visit) -> None:
        if not visit.by_hand:
            async with self._pool.connection(visit.timeout) as wire:
                await self._use(visit, wire)
            return
        wire = await self._pool.getconn(visit.timeout)
        try:
            await self._use(visit, wire)
        finally:
            await self._pool.putconn(wire)

    async def _use(self, visit: Visit, wire: Wire) -> None:
        self._check_got(visit, wire)
        wire.user = visit
        try:
            await self._database.query(wire, visit.hold)
            if visit.raises:
                raise CallerError
        finally:
            self._violations.expect(wire.user is visit, f"{wire} of {visit} is with {wire.user}")
            wire.user = None
            if self._sim.rng.random() < 0.1:
                self._cancel_first_waiter()

    def _pinged(self, wire: Wire) -> None:
        if (visit := self._by_task.get(asyncio.current_task())) is not None:
            visit.looked_at = wire
            visit.looks += 1

    # -- checks --------------------------------------------------------------------------------

    def _check_got(self, visit: Visit, wire: Wire) -> None:
        violations, item = self._violations, self._pool._core.items.get(id(wire))
        violations.expect(wire.user is None, f"{wire} is handed to {visit} and {wire.user}")
        violations.expect(not wire.closing, f"{wire} is handed out although it is closed")
        assert item is not None, f"{wire} is in use, and the pool does not know it"
        visit.got, visit.served = wire, item.since
        left = item.expires - self._sim.now
        guard = self._pool.config.guard_window
        violations.expect(left > guard, f"{wire} is handed out {left:.3f} s before its end")
        assert wire.lease is not None
        lost = self._ledger.lost.get(wire.lease, math.inf)
        violations.expect(item.since <= lost, f"{wire} is handed out although its lease is lost")

    def _check_end(self, visit: Visit) -> None:
        waited = min(visit.served, visit.ended) - visit.arrived
        late = waited - visit.timeout - PING_TIMEOUT * visit.looks
        self._violations.expect(late <= EXACT, f"{visit} waited {late:.3f} s too long")
        if visit.outcome == "PoolTimeout":
            early = visit.timeout - waited
            self._violations.expect(early <= EXACT, f"{visit} timed out {early:.3f} s too early")
        if visit.outcome == "cancelled":
            late = visit.ended - visit.cancelled
            self._violations.expect(
                late <= EXACT, f"{visit} ended {late:.3f} s after its cancellation"
            )

    def check_order(self) -> None:
        """Check that no caller was served while an earlier one waited."""
        soonest, overtaker = math.inf, None
        arrived = [visit for visit in self.visits if visit.place]
        for visit in sorted(arrived, key=lambda visit: -visit.place):
            until = min(visit.served, visit.cancelled, visit.ended)
            fair = visit.lost_its_place or soonest >= until - EXACT
            self._violations.expect(
                fair, f"{overtaker} was served at {soonest:.6f} s, before {visit}"
            )
            if visit.served < soonest:
                soonest, overtaker = visit.served, visit

    def check_all_done(self) -> None:
        """Check that every caller has ended."""
        for visit in self.visits:
            assert visit.task is not None
            self._violations.expect(visit.task.done(), f"{visit} hangs")

    def waiting(self) -> list[Visit]:
        """Return the callers that wait."""
        return [visit for visit in self.visits if visit.waits]
