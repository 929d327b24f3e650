"""What does it cost to check out a connection from a pool and to return it?

Each round runs a short burst of ours and one of psycopg_pool, in alternating order; in some rounds
the other peers follow. A figure against psycopg_pool is the median of the ratios of all rounds,
with its quartiles. Bursts are short because noise changes slowly: both sides of a round meet the
same noise. All bursts take the same time, because a longer burst would meet more noise.

All pools have ten connections to one real server, are open at the same time, end transactions and
keep statistics, with asyncio's debug mode off and the default logging. After each burst the
statistics of our pool and of psycopg_pool must show the number of checkouts that were made.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import text

from _harness import Figure, Report, main, quartiles, ratios
from _pool_sides import (
    SIZE,
    Floor,
    Side,
    async_engines,
    async_sides,
    asyncpg_sides,
    thread_engines,
    thread_sides,
)
from moored.embedded import SyncEmbeddedPostgres

TASKS = 50
THREADS = 4
#: The target duration of a burst, in seconds.
BURST = 0.020
#: The minimum of checkouts of each task or thread in a burst.
LEAST = 6
SELECT_1 = text("SELECT 1")

Speed = Callable[[], float]


# -- the work ----------------------------------------------------------------------------------


async def checkout(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        async with block():
            pass


async def checkout_and_yield(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        async with block():
            await asyncio.sleep(0)


async def query(side: Side, count: int) -> None:
    for _ in range(count):
        async with side.block() as conn:
            cursor = await conn.execute("SELECT 1")
            if await cursor.fetchone() != (1,):
                raise AssertionError("SELECT 1 did not return 1")


def checkout_in_thread(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        with block():
            pass


def query_in_thread(side: Side, count: int) -> None:
    for _ in range(count):
        with side.block() as conn:
            if conn.execute("SELECT 1").fetchone() != (1,):
                raise AssertionError("SELECT 1 did not return 1")


async def query_engine(side: Side, count: int) -> None:
    for _ in range(count):
        async with side.block() as conn:
            if await conn.scalar(SELECT_1) != 1:
                raise AssertionError("SELECT 1 did not return 1")


def query_engine_in_thread(side: Side, count: int) -> None:
    for _ in range(count):
        with side.block() as conn:
            if conn.scalar(SELECT_1) != 1:
                raise AssertionError("SELECT 1 did not return 1")


# -- bursts ------------------------------------------------------------------------------------


class Tasks:
    """Runs bursts in one task, or in many that share the pool."""

    def __init__(self, runner: asyncio.Runner, number: int = 1) -> None:
        self._runner = runner
        self.number = number

    def __call__(self, work: Callable[[Side, int], Any], side: Side, each: int) -> float:
        return self._runner.run(self._timed(work, side, each))

    async def _timed(self, work: Callable[[Side, int], Any], side: Side, each: int) -> float:
        begin = time.perf_counter()
        if self.number == 1:
            await work(side, each)
        else:
            await asyncio.gather(*(work(side, each) for _ in range(self.number)))
        return time.perf_counter() - begin


class Threads:
    """Runs bursts in threads of an executor."""

    def __init__(self, executor: ThreadPoolExecutor, number: int) -> None:
        self._executor = executor
        self.number = number

    def __call__(self, work: Callable[[Side, int], None], side: Side, each: int) -> float:
        begin = time.perf_counter()
        for done in [self._executor.submit(work, side, each) for _ in range(self.number)]:
            done.result()
        return time.perf_counter() - begin


class Bursts:
    """One side's bursts; the size of each is set from the speed of the last one."""

    def __init__(self, run: Tasks | Threads, work: Callable[[Side, int], Any], side: Side) -> None:
        self._run = run
        self._work = work
        self._side = side
        self._each = LEAST

    def __call__(self) -> float:
        """Run a burst; return its checkouts per second, after checking the pool's counters."""
        count = self._each * self._run.number
        self._side.pop()
        speed = count / self._run(self._work, self._side, self._each)
        self._side.check(count, contended=self._run.number > SIZE)
        self._each = max(LEAST, round(speed * BURST / self._run.number))
        return speed


def rounds(speeds: Mapping[str, Speed], number: int) -> dict[str, list[float]]:
    """Return the speeds of each side: of the first two in each round, of the others in some."""
    found: dict[str, list[float]] = {name: [] for name in speeds}
    first, second, *others = speeds
    for turn in range(-5, number):  # the first rounds warm up
        pair = (first, second) if turn % 2 else (second, first)
        for name in (*pair, *(others if turn % 5 == 0 else ())):
            speed = speeds[name]()
            if turn >= 0:
                found[name].append(speed)
    return found


def ratio(found: dict[str, list[float]], one: str, other: str) -> Figure:
    """Return how many times faster one side is than the other."""
    return quartiles(ratios(found[one], found[other]), "times")


# -- the figures -------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A workload for all pools in the same rounds."""

    name: str
    run: Tasks | Threads
    work: Callable[[Side, int], Any]

    def rounds(self, sides: Mapping[str, Side], number: int) -> dict[str, list[float]]:
        """Return the speed of each side in each round."""
        speeds = {name: Bursts(self.run, self.work, side) for name, side in sides.items()}
        return rounds(speeds, number)

    def measure(self, report: Report, sides: Mapping[str, Side], number: int) -> None:
        """Report ours against psycopg_pool, and the speed of each side."""
        found = self.rounds(sides, number)
        report.add(f"{self.name}_vs_psycopg_pool", ratio(found, "ours", "psycopg_pool"))
        for name, speeds in found.items():
            figure = self.name if name == "ours" else f"{name}_{self.name}"
            report.add(f"{figure}_ops_per_s", quartiles(speeds, "/s"))


def measure_async(report: Report, url: str, number: int) -> None:
    with asyncio.Runner(debug=False) as runner, async_sides(url, runner) as sides:
        one, many = Tasks(runner), Tasks(runner, TASKS)
        alone = Trial("async_uncontended", one, checkout)
        alone.measure(report, sides, number)
        Trial("async_contended", many, checkout_and_yield).measure(report, sides, number)
        found = alone.rounds({"floor": Side(Floor().connection), "ours": sides["ours"]}, 2 * number)
        report.add("floor_vs_async_uncontended", ratio(found, "floor", "ours"))
        report.add("floor_ops_per_s", quartiles(found["floor"], "/s"))
        Trial("select1_async", one, query).measure(report, pair(sides), number)


def measure_threads(report: Report, url: str, number: int) -> None:
    with ThreadPoolExecutor(THREADS) as executor, thread_sides(url) as sides:
        run = Threads(executor, THREADS)
        Trial("threads", run, checkout_in_thread).measure(report, sides, number)
        asking = Trial("select1_threads", run, query_in_thread)
        asking.measure(report, pair(sides), number)


def measure_engines(report: Report, url: str, number: int) -> None:
    """Compare SQLAlchemy on a reservoir with SQLAlchemy's own pool, with a query per checkout."""
    with asyncio.Runner(debug=False) as runner, async_engines(url, runner) as sides:
        found = Trial("", Tasks(runner), query_engine).rounds(sides, number)
    report.add("sqlalchemy_select1_vs_queuepool", ratio(found, "ours", "queuepool"))
    with ThreadPoolExecutor(THREADS) as executor, thread_engines(url) as sides:
        found = Trial("", Threads(executor, THREADS), query_engine_in_thread).rounds(sides, number)
    report.add("sqlalchemy_select1_threads_vs_queuepool", ratio(found, "ours", "queuepool"))


def measure_asyncpg(report: Report, url: str, number: int) -> None:
    """Compare the pools of asyncpg connections, both with a reset query, which takes most time."""
    with asyncio.Runner(debug=False) as runner, asyncpg_sides(url, runner) as sides:
        found = Trial("", Tasks(runner), checkout).rounds(sides, number)
    report.add("asyncpg_uncontended_vs_asyncpg_pool", ratio(found, "ours", "asyncpg_pool"))


def pair(sides: Mapping[str, Side]) -> dict[str, Side]:
    """Return the two sides with the same driver, for which a query costs the same."""
    return {name: sides[name] for name in ("ours", "psycopg_pool")}


def measure(report: Report, quick: bool) -> None:
    number = 100 if quick else 400
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(SyncEmbeddedPostgres(directory / "postgres")).url
        measure_async(report, url, number)
        measure_threads(report, url, number)
        measure_engines(report, url, number)
        measure_asyncpg(report, url, number)
    report.notes.append(
        f"pools of {SIZE}; {number} rounds of bursts of {BURST * 1000:g} ms; contended: {TASKS} "
        f"tasks that yield while they hold; {THREADS} threads; in brackets the quartiles; every "
        "checkout counted and every answer checked; asyncpg without its reset query, except in "
        "asyncpg_uncontended, where both reset"
    )


if __name__ == "__main__":
    main("pool", (__doc__ or "").splitlines()[0], measure)
