"""Random faults in a pool, at its server, at its lease store and in the wall clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.leases.faulty_network import NetworkFaults
from tests.sim.reservoir_database import Database, ServerFaults, Wire
from tests.sim.reservoir_ledger import Ledger

from moored.reservoir import AsyncConnectionPool
from moored.testing import Sim

__all__ = ["PoolFaults"]


class Crash(Exception):
    """Crashes a child of the pool's supervisor."""


class PoolFaults:
    """Injects faults into a pool, its server, its lease store and the clocks."""

    def __init__(
        self,
        sim: Sim,
        pool: AsyncConnectionPool[Wire],
        database: Database,
        ledger: Ledger,
        weather: NetworkFaults,
    ) -> None:
        self._sim = sim
        self._pool = pool
        self._database = database
        self._ledger = ledger
        self._weather = weather
        #: How often each part of the pool is still to crash, by the method that raises.
        self._crashes: Counter[str] = Counter()
        self._plant_crashes()

    def plan(self, number: int, *, until: float) -> None:
        """Schedule so many faults, at random times."""
        kinds = (
            self.crash,
            self.drain_and_crash,
            self.kill_connections,
            *2 * (self.server_faults,),
            *2 * (self.store_faults,),
            self.revoke,
            self.step_clock,
            self.resize,
            self.drain,
            self.check,
        )
        for _ in range(number):
            self._sim.at(self._sim.random(0.2, until), self._sim.rng.choice(kinds))

    def stop(self) -> None:
        """Stop the crashes; the other faults have ended by then."""
        self._crashes.clear()

    # -- in the pool ---------------------------------------------------------------------------

    def _plant_crashes(self) -> None:
        core: Any = self._pool._core
        for name in ("plan", "scan"):
            setattr(core, name, self._fragile(name, getattr(core, name)))

    def _fragile(self, name: str, decide: Callable[..., Any]) -> Callable[..., Any]:
        def fragile(*args: Any, **options: Any) -> Any:
            if self._crashes[name]:
                self._crashes[name] -= 1
                raise Crash(name)
            return decide(*args, **options)

        return fragile

    def crash(self) -> None:
        rng = self._sim.rng
        self._crashes[rng.choice(("plan", "scan"))] = rng.randint(1, 4)
        self._pool.reservoir.upkeep.nudge()
        if rng.random() < 0.5:
            self.kill_connections()

    async def drain_and_crash(self) -> None:
        """Drain the pool several times, and crash the refiller each time."""
        for _ in range(4):
            await self.drain()
            await asyncio.sleep(self._sim.random(0.05, 0.3))
            self._crashes["plan"] = 1
            self._pool.reservoir.upkeep.nudge()
            await asyncio.sleep(self._sim.random(0.05, 0.3))

    async def resize(self) -> None:
        """Resize the pool, often while connects are in progress."""
        rng = self._sim.rng
        if rng.random() < 0.5:
            await self.drain()
            await asyncio.sleep(rng.uniform(0.0, 0.4))
        if not self._pool.closed:
            most = rng.randint(1, 8)
            await self._pool.resize(rng.randint(0, most), most)

    async def drain(self) -> None:
        if not self._pool.closed:
            await self._pool.drain()

    async def check(self) -> None:
        if not self._pool.closed:
            await self._pool.check()

    # -- at the server -------------------------------------------------------------------------

    def kill_connections(self) -> None:
        self._database.kill(self._sim.rng.choice((0.3, 1.0)))

    async def server_faults(self) -> None:
        rng = self._sim.rng
        self._database.faults = faults = ServerFaults()
        if rng.random() < 0.3:
            # As behind a network that drops all packets.
            faults.hangs = faults.ping_hangs = faults.close_hangs = 1.0
        else:
            name = rng.choice([name for name in vars(faults) if name != "takes"])
            setattr(faults, name, rng.choice((0.5, 1.0)))
        if rng.random() < 0.5:
            faults.takes = (0.1, 1.2)
        if rng.random() < 0.5:
            self.kill_connections()
        await asyncio.sleep(rng.uniform(0.2, 4.0))
        self._database.faults = ServerFaults()

    # -- at the lease store, and in the clocks -----------------------------------------------------

    async def store_faults(self) -> None:
        rng, weather = self._sim.rng, self._weather
        kind = rng.choice(("slow", "deaf", "lossy", "refused"))
        if kind == "slow":
            weather.there = weather.back = (0.05, rng.choice((0.4, 1.5)))
        elif kind == "deaf":
            weather.lost_answers = rng.choice((0.5, 1.0))
        elif kind == "lossy":
            weather.lost_requests = rng.choice((0.5, 1.0))
        else:
            weather.refused = True
        await asyncio.sleep(rng.uniform(0.2, 5.0))
        self._clear_up()

    def revoke(self) -> None:
        self._ledger.revoke(self._sim.rng.randint(1, 4))

    def step_clock(self) -> None:
        self._sim.wall_step(self._sim.rng.choice((-3600.0, -5.0, 5.0, 3600.0)))

    def _clear_up(self) -> None:
        for name, value in vars(NetworkFaults()).items():
            setattr(self._weather, name, value)
