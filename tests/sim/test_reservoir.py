"""Simulations of a pool: its invariants hold whatever crashes, hangs or is late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.logs import silent
from tests.mutants import planted_defects
from tests.sim.reservoir_scenario import PoolScenario

from moored.leases import RateLimit
from moored.reservoir import AsyncConnectionPool, ReservoirConfig, _pool, _upkeep
from moored.reservoir._budget import Budget
from moored.reservoir._core import Core, Waiter
from moored.reservoir._item import Item
from moored.reservoir._recipe import Recipe
from moored.reservoir._reservoir import Reservoir
from moored.reservoir._upkeep import Upkeep
from moored.testing import Mutant, Sim, assert_caught, mutant, run_one, scaled, simulate


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the log: thousands of simulated outages log many lines."""
    with silent("moored"):
        yield


async def pool_with_faults(sim: Sim) -> int:
    """Callers are served in order and none hangs, limits hold, nothing leaks, the pool recovers."""
    scenario = PoolScenario(sim)
    await scenario.run()
    return len(scenario.database.connects)


def test_a_pool_keeps_its_invariants_under_random_faults() -> None:
    report = simulate(pool_with_faults, scaled(1000, least=8))
    assert report.distinct == report.schedules


# -- interleavings that random schedules seldom meet --------------------------------------------


async def connect() -> object:
    await asyncio.sleep(0.01)
    return object()


@pytest.mark.parametrize("turns", range(8))
def test_a_first_caller_that_is_cancelled_leaves_a_pool_that_works(turns: int) -> None:
    async def scenario(sim: Sim) -> None:
        async with AsyncExitStack() as stack:
            pool = AsyncConnectionPool(connect=connect, endpoint="db")
            stack.push_async_callback(pool.close)
            first = asyncio.create_task(pool.getconn())
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            await pool.putconn(await pool.getconn(timeout=5.0))

    simulate(scenario, scaled(10, least=4))


def test_a_connection_whose_ping_ends_in_the_guard_window_is_not_handed_out() -> None:
    config = ReservoirConfig(
        max_size=1, base_lifetime=3.0, lifetime_jitter=0.0, guard_window=1.0, start_stagger=0.0
    )

    async def ping(conn: object) -> None:
        await asyncio.sleep(0.5)

    async def scenario(sim: Sim) -> None:
        pool = AsyncConnectionPool(
            connect=connect, ping=ping, check_idle=0.1, config=config, endpoint="db"
        )
        async with pool:
            await pool.wait()
            await asyncio.sleep(1.7)
            async with pool.connection() as conn:
                item = pool._core.items[id(conn)]
                assert sim.now < item.expires - config.guard_window
                assert sum(pool.statistics().discards.values()) == 1

    run_one(scenario, 1)


# -- planted defects ---------------------------------------------------------------------------

_search, _leave, _hand_over = Core.search, Core.leave, Core._hand_over
_close_and_release, _close_item, _arrive, _refill = (
    Upkeep._close_and_release,
    Upkeep._close_item,
    Upkeep._arrive,
    Upkeep._refill,
)
_carry_out, _stop = Reservoir.carry_out, Upkeep.stop


def _looks_at_no_clock(self: Core[Any], now: float) -> Item[Any] | None:
    """A ready connection is handed out, however soon it expires."""
    for item in self.ready:
        item.usable_until = item.expires + 1e9
    return _search(self, now)


def _serves_the_last(self: Core[Any], item: Item[Any], now: float) -> Waiter[Any]:
    """The last waiter is served first."""
    self.waiting.reverse()
    try:
        return _hand_over(self, item, now)
    finally:
        self.waiting.reverse()


def _size_without_closing(self: Core[Any]) -> int:
    """A connection does not count once its close has begun."""
    return len(self.items) + self.opening


def _size_without_those_in_use(self: Core[Any]) -> int:
    """Connections in use do not count."""
    return len(self.ready) + self.opening + self.closing


def _takes_it_along(
    self: Core[Any], waiter: Waiter[Any], now: float, *, late: bool = False
) -> Item[Any] | None:
    """A caller that is cancelled when it is served keeps its connection."""
    _leave(self, waiter, now, late=late)
    return None


def _never_fails(self: Core[Any]) -> None:
    """A failed connect counts as in progress for ever."""


def _ignores_lost_leases(self: Upkeep[Any], item: Item[Any], error: BaseException) -> None:
    """A connection whose lease was lost is kept."""


async def _keeps_the_lease(self: Upkeep[Any], conn: Any, lease: Any) -> None:
    """A failed connect does not release its lease."""
    await _close_and_release(self, conn, None)


async def _gives_back_early(self: Upkeep[Any], item: Item[Any]) -> None:
    """The lease is released before the connection is closed."""
    if item.lease is not None:
        await item.lease.release()
    await _close_item(self, item)


async def _gives_back_twice(self: Upkeep[Any], item: Item[Any]) -> None:
    """The lease is released twice: here, and by the code that closed the connection."""
    await _close_item(self, item)
    if item.lease is not None and item.lease.error is None:
        await item.lease._keeper.release(item.lease._entry)


async def _counts_anew(self: Upkeep[Any], ctx: Any) -> None:
    """A restarted refiller starts with a full rate bucket."""
    if (budget := self.budget) is not None:
        key = f"connects-{self.clock.monotonic()}"
        budget.rate = budget.leases.rate_limit(key, rate=budget.rate.rate, burst=budget.rate.burst)
    await _refill(self, ctx)


async def _takes_no_turn(self: Budget) -> None:
    """Connections are opened without a rate limit."""
    await asyncio.sleep(0)


def _drops_the_late(self: Upkeep[Any], conn: Any, lease: Any, began: float) -> None:
    """A connection that arrives after the close of the pool is never closed."""
    if self.core.open:
        _arrive(self, conn, lease, began)


def _leaves_it_open(self: Reservoir[Any], waiter: Waiter[Any] | None) -> None:
    """A connection that returns to a closed pool is never closed."""
    if self.state == "open":
        _carry_out(self, waiter)


async def _waits_for_ever(self: Recipe, token: str | None, close: Any) -> Any:
    """A connect has no timeout."""
    return await self.connect(token)


async def _cuts_short(self: Upkeep[Any], timeout: float) -> int:
    """After the timeout every close in progress is cancelled, even one that has just begun."""
    left = await _stop(self, timeout)
    for task in self._tasks:
        task.cancel()
    return left


def _does_not_look_again(self: Upkeep[Any]) -> None:
    """A connection that was wanted before a resize is opened after it."""


MUTANTS = [
    mutant(Core, "search", _looks_at_no_clock, name="no guard window at checkout"),
    mutant(Core, "_hand_over", _serves_the_last, name="the last waiter served first"),
    mutant(Core, "size", property(_size_without_closing), name="closing connections not counted"),
    mutant(Core, "size", property(_size_without_those_in_use), name="used connections not counted"),
    mutant(Core, "leave", _takes_it_along, name="a cancelled caller keeps its connection"),
    mutant(Core, "failed", _never_fails, name="a failed connect counted for ever"),
    mutant(Upkeep, "_lease_lost", _ignores_lost_leases, name="a lost lease ignored"),
    mutant(Upkeep, "_close_and_release", _keeps_the_lease, name="a failed connect keeps its lease"),
    mutant(Upkeep, "_close_item", _gives_back_early, name="a lease released too early"),
    mutant(Upkeep, "_close_item", _gives_back_twice, name="a lease released twice"),
    mutant(Upkeep, "_refill", _counts_anew, name="a full rate bucket after a crash"),
    mutant(Budget, "turn", _takes_no_turn, name="no rate limit"),
    mutant(Upkeep, "_arrive", _drops_the_late, name="a connect that ends after the close leaks"),
    mutant(Reservoir, "carry_out", _leaves_it_open, name="a return after the close leaks"),
    mutant(Upkeep, "stop", _cuts_short, name="closes cancelled at the timeout"),
    mutant(
        Upkeep,
        "_check_wanted",
        _does_not_look_again,
        name="a connect that a resize made superfluous",
    ),
    mutant(Recipe, "connect_in_time", _waits_for_ever, name="a connect without a timeout"),
    mutant(_upkeep, "CLOSE_PATIENCE", 1e9, name="a close without a timeout"),
    mutant(_pool, "PING_TIMEOUT", 1e9, name="a ping without a timeout"),
    mutant(RateLimit, "_pace", lambda self, n, now: 0.0, name="a new burst when the store is down"),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(
        MUTANTS,
        "a ping without a timeout",
        "a connect without a timeout",
        "a lost lease ignored",
        "a connect that a resize made superfluous",
        "a connect that ends after the close leaks",
        "a lease released twice",
        "used connections not counted",
        "a failed connect keeps its lease",
        "a new burst when the store is down",
    ),
)
def test_a_planted_defect_is_caught(planted: Mutant) -> None:
    caught = assert_caught(pool_with_faults, planted, within=400, clean=0)
    assert isinstance(caught.error, AssertionError), caught
