"""A pool on bad days: whatever crashes, hangs or comes late, what it promises holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.logs import silent
from tests.sim.reservoir_day import Day

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
    """No log: thousands of simulated outages are many lines."""
    with silent("moored"):
        yield


async def pool_on_a_bad_day(sim: Sim) -> int:
    """Fair, never over a limit, nothing lost, nobody hangs, and well again afterwards."""
    day = Day(sim)
    await day.live()
    return len(day.database.connects)


def test_two_thousand_bad_days() -> None:
    report = simulate(pool_on_a_bad_day, scaled(2000, least=100))
    assert report.distinct == report.schedules


# -- moments that chance seldom meets ------------------------------------------------------------


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

    simulate(scenario, 10)


def test_a_look_that_lasts_into_the_guard_window_was_in_vain() -> None:
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


# -- defects that must be noticed --------------------------------------------------------------

_search, _leave, _hand_over = Core.search, Core.leave, Core._hand_over
_undo, _bury, _arrive, _refill = Upkeep._undo, Upkeep._bury, Upkeep._arrive, Upkeep._refill
_carry_out, _stop = Reservoir.carry_out, Upkeep.stop


def _looks_at_no_clock(self: Core[Any], now: float) -> Item[Any] | None:
    """What is ready is handed out, however little life it has left."""
    for item in self.ready:
        item.usable_until = item.expires + 1e9
    return _search(self, now)


def _serves_the_last(self: Core[Any], item: Item[Any], now: float) -> Waiter[Any]:
    """Whoever came last is served first."""
    self.waiting.reverse()
    try:
        return _hand_over(self, item, now)
    finally:
        self.waiting.reverse()


def _size_without_closing(self: Core[Any]) -> int:
    """A connection whose close has begun does not count any more."""
    return len(self.items) + self.opening


def _size_without_those_in_use(self: Core[Any]) -> int:
    """Only what is ready counts, as in the original."""
    return len(self.ready) + self.opening + self.closing


def _takes_it_along(self: Core[Any], waiter: Waiter[Any], now: float) -> Item[Any] | None:
    """A caller that is cancelled just when it was served keeps what it got."""
    _leave(self, waiter, now)
    return None


def _never_fails(self: Core[Any]) -> None:
    """A connect that failed counts as on its way for ever."""


def _ignores_lost_leases(self: Upkeep[Any], item: Item[Any], error: BaseException) -> None:
    """A connection without a lease is as good as any other."""


async def _keeps_the_lease(self: Upkeep[Any], conn: Any, lease: Any) -> None:
    """A connect that fails does not give its lease back."""
    await _undo(self, conn, None)


async def _gives_back_early(self: Upkeep[Any], item: Item[Any]) -> None:
    """The lease is given back before the connection is closed."""
    if item.lease is not None:
        await item.lease.release()
    await _bury(self, item)


async def _gives_back_twice(self: Upkeep[Any], item: Item[Any]) -> None:
    """The lease is given back here, and by whoever closed the connection."""
    await _bury(self, item)
    if item.lease is not None and item.lease.error is None:
        await item.lease._keeper.release(item.lease._entry)


async def _counts_anew(self: Upkeep[Any], ctx: Any) -> None:
    """A refiller that was restarted knows nothing of what the one before it has used up."""
    if (budget := self.budget) is not None:
        key = f"connects-{self.clock.monotonic()}"
        budget.rate = budget.leases.rate_limit(key, rate=budget.rate.rate, burst=budget.rate.burst)
    await _refill(self, ctx)


async def _takes_no_turn(self: Budget) -> None:
    """Connections are opened as fast as they are wanted."""
    await asyncio.sleep(0)


def _drops_the_late(self: Upkeep[Any], conn: Any, lease: Any, began: float) -> None:
    """What arrives when the pool was closed meanwhile is nobody's."""
    if self.core.open:
        _arrive(self, conn, lease, began)


def _leaves_it_open(self: Reservoir[Any], waiter: Waiter[Any] | None) -> None:
    """What comes back to a closed pool is forgotten."""
    if self.state == "open":
        _carry_out(self, waiter)


async def _waits_for_ever(self: Recipe, token: str | None, close: Any) -> Any:
    """A connect may take as long as it likes."""
    return await self.connect(token)


async def _cuts_short(self: Upkeep[Any], timeout: float) -> int:
    """When the time is over, what still closes is cancelled, also what has only just come back."""
    left = await _stop(self, timeout)
    for task in self._tasks:
        task.cancel()
    return left


def _does_not_look_again(self: Upkeep[Any]) -> None:
    """What was wanted before a resize is opened after it."""


MUTANTS = [
    mutant(Core, "search", _looks_at_no_clock, name="no guard window at checkout"),
    mutant(Core, "_hand_over", _serves_the_last, name="the last come served first"),
    mutant(
        Core, "size", property(_size_without_closing), name="those that are closing not counted"
    ),
    mutant(Core, "size", property(_size_without_those_in_use), name="those in use not counted"),
    mutant(Core, "leave", _takes_it_along, name="a cancelled caller keeps its connection"),
    mutant(Core, "failed", _never_fails, name="a failed connect counted for ever"),
    mutant(Upkeep, "_lease_lost", _ignores_lost_leases, name="a lost lease ignored"),
    mutant(Upkeep, "_undo", _keeps_the_lease, name="a failed connect keeps its lease"),
    mutant(Upkeep, "_bury", _gives_back_early, name="a lease given back too early"),
    mutant(Upkeep, "_bury", _gives_back_twice, name="a lease given back twice"),
    mutant(Upkeep, "_refill", _counts_anew, name="the rate counted anew after a crash"),
    mutant(Budget, "turn", _takes_no_turn, name="no rate limit"),
    mutant(Upkeep, "_arrive", _drops_the_late, name="a connect that ends after the close"),
    mutant(Reservoir, "carry_out", _leaves_it_open, name="a return that comes after the close"),
    mutant(Upkeep, "stop", _cuts_short, name="a close that is cut short"),
    mutant(
        Upkeep,
        "_check_wanted",
        _does_not_look_again,
        name="a connect that a resize made one too many",
    ),
    mutant(Recipe, "connect_in_time", _waits_for_ever, name="a connect without a time limit"),
    mutant(_upkeep, "CLOSE_PATIENCE", 1e9, name="a close without a time limit"),
    mutant(_pool, "PING_TIMEOUT", 1e9, name="a look without a time limit"),
    mutant(RateLimit, "_pace", lambda self, n, now: 0.0, name="a new burst when the store is down"),
]


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda planted: planted.name)
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    caught = assert_caught(pool_on_a_bad_day, planted, within=400, clean=4)
    assert isinstance(caught.error, AssertionError), caught
