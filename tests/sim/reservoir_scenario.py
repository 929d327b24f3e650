"""A pool whose server, lease store and own parts fail at random."""

from __future__ import annotations

import asyncio

from tests.leases.faulty_network import NetworkFaults
from tests.sim.reservoir_callers import Callers
from tests.sim.reservoir_database import Database, Wire, most_over
from tests.sim.reservoir_faults import PoolFaults
from tests.sim.reservoir_ledger import CountedLeases, Ledger
from tests.sim.reservoir_violations import EXACT, Violations

from moored.leases import Policy
from moored.leases._policy import OnUnavailable
from moored.reservoir import AsyncConnectionPool, ReservoirConfig
from moored.testing import Sim

__all__ = ["PoolScenario"]

FAULTS_UNTIL = 10.0
#: Seconds after the last fault: the longest backoffs, of the refiller and of the lease client, and
#: the TTL of leases whose grant was lost.
RECOVERY = 45.0
#: Seconds after the close: connections in use return, and hanging closes time out.
SETTLED = 12.0
RATE, BURST = 6.0, 4
TTL = 6.0


class PoolScenario:
    """A pool, its server, its lease store and its callers."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.violations = Violations(sim)
        self.weather = NetworkFaults()
        self.ledger = Ledger(sim, self.violations, self.weather)
        self.database = Database(sim, self.violations, self.ledger.lease_of_task)
        self.ledger.wires = self.database.physical
        self.leases = CountedLeases(self.ledger, self._policy())
        self.pool = self._pool()
        self.database.most = self._most
        self.callers = Callers(sim, self.violations, self.pool, self.database, self.ledger)
        self.faults = PoolFaults(sim, self.pool, self.database, self.ledger, self.weather)

    def _policy(self) -> Policy:
        outage: OnUnavailable = self.sim.rng.choice(("refuse", "local"))
        return Policy(on_unavailable=outage, renew_every=2.0, margin=0.5, timeout=1.0)

    def _pool(self) -> AsyncConnectionPool[Wire]:
        rng, database = self.sim.rng, self.database
        config = ReservoirConfig(
            enabled=rng.random() < 0.8,
            max_size=rng.randint(2, 6),
            low_watermark=rng.choice((None, 0, 1)),
            base_lifetime=rng.choice((4.0, 8.0)),
            lifetime_jitter=rng.choice((0.0, 2.0)),
            guard_window=1.0,
            rate=RATE,
            burst=BURST,
            connect_timeout=1.0,
            scan_every=rng.choice((0.5, 3.0)),
            max_idle=2.0,
            lease_limit=rng.choice((8, 10_000)),
            lease_ttl=TTL,
        )
        return AsyncConnectionPool(
            config=config,
            leases=self.leases,
            endpoint="db",
            name="pool",
            max_waiting=rng.choice((0, 0, 8)),
            queue_target=rng.choice((0.2, 5.0)),
            queue_interval=1.0,
            check_idle=rng.choice((0.2, 1.0, None)),
            check=rng.choice((None, None, database.ping)),
            configure=rng.choice((None, database.configure)),
            reset=rng.choice((None, database.reset)),
            **database.hooks(),
        )

    def _most(self) -> int:
        return self.pool.max_size

    # -- phases --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Open the pool, inject faults, let it recover, close it; some seeds close it early."""
        self._plan()
        await self.leases.open()
        await self.pool.open()
        if self.sim.rng.random() < 0.3:
            await asyncio.sleep(self.sim.random(0.0, FAULTS_UNTIL))
        else:
            await asyncio.sleep(FAULTS_UNTIL + 5.0)
            self.faults.stop()
            await self._recover()
        await self._end()

    def _plan(self) -> None:
        rng = self.sim.rng
        self.faults.plan(rng.randint(3, 15), until=FAULTS_UNTIL)
        for _ in range(rng.randint(40, 150)):
            self.sim.at(rng.uniform(0.0, FAULTS_UNTIL + 1.0), self.callers.arrive)
        for _ in range(rng.randint(0, 2)):
            self.sim.at(rng.uniform(0.0, FAULTS_UNTIL), self._burst)

    def _burst(self) -> None:
        for _ in range(self.sim.rng.randint(5, 15)):
            self.callers.arrive()

    async def _recover(self) -> None:
        """Check that the pool refills by itself after the faults, and serves a caller."""
        core, began = self.pool._core, self.sim.now
        while len(core.items) < core.target:
            await asyncio.sleep(0.1)
            if self.sim.now > began + RECOVERY:
                self.violations.expect(
                    False, f"{len(core.items)} of {core.target} after the faults"
                )
                return
        served = await self.callers.is_served(patience=RECOVERY)
        self.violations.expect(served, "a patient caller is not served after the faults")

    async def _end(self) -> None:
        for _ in range(self.sim.rng.randint(0, 6)):
            self.callers.arrive()
        closing = await self._begin_to_close(self.sim.rng.choice((0.0, 0.02, 5.0)))
        await asyncio.sleep(EXACT)
        late = self.callers.waiting()
        self.violations.expect(not late, f"{len(late)} callers wait for a closed pool")
        await closing
        await asyncio.sleep(max(SETTLED, FAULTS_UNTIL + 6.0 - self.sim.now))
        self.check_end()
        await self.leases.close()
        self.ledger.check_none_left()
        self.violations.raise_first()

    async def _begin_to_close(self, timeout: float) -> asyncio.Task[None]:
        """Close the pool at a random time, or at the worst one: just before a connect ends."""
        rng, loop = self.sim.rng, self.sim.loop
        closing: asyncio.Future[asyncio.Task[None]] = loop.create_future()

        def close() -> None:
            if not closing.done():
                closing.set_result(loop.create_task(self.pool.close(timeout), name="close"))

        if rng.random() < 0.5:
            self.database.on_handshake = close
            await self.pool.drain()
        self.sim.after(rng.choice((0.0, 0.01, 0.1, 0.5)), close)
        return await closing

    def check_end(self) -> None:
        """Check, after the close, that nothing is left, and the order and the rate of connects."""
        violations, database = self.violations, self.database
        self.ledger.check_all_ended()
        self.callers.check_all_done()
        self.callers.check_order()
        left = list(database.physical)
        violations.expect(not left, f"{left} were never closed")
        over = most_over(database.connects, rate=RATE, burst=BURST)
        violations.expect(over <= EXACT, f"{over:.3f} connects too many in a window")
