"""What does it cost to take a connection from the pool and to give it back?

Each round runs a short burst of ours and one of psycopg_pool's, in changing order; now and then
the other peers have theirs. A figure against psycopg_pool is the median of the ratios of all
rounds, with its quartiles. Bursts are short because noise is slow: both sides of a round meet the
same noise, while two long runs meet two different ones. And they last equally long, whatever the
side can do in that time: a longer one would meet more of it.

All pools have ten connections to one real server, are open at the same time, end transactions and
keep statistics, with asyncio's debug mode off and logging as it is by default. After each burst
the statistics of our pool and of psycopg_pool's must tell of as many checkouts as were asked for.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import text

from _harness import Figure, Report, main
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
#: How long a burst should last.
BURST = 0.020
#: What each task or thread does in a burst at least.
LEAST = 6
SELECT_1 = text("SELECT 1")

Speed = Callable[[], float]


# -- the work ----------------------------------------------------------------------------------


async def take(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        async with block():
            pass


async def take_and_hold(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        async with block():
            await asyncio.sleep(0)


async def take_and_ask(side: Side, count: int) -> None:
    for _ in range(count):
        async with side.block() as conn:
            cursor = await conn.execute("SELECT 1")
            if await cursor.fetchone() != (1,):
                raise AssertionError("the server did not answer 1")


def take_in_thread(side: Side, count: int) -> None:
    block = side.block
    for _ in range(count):
        with block():
            pass


def take_and_ask_in_thread(side: Side, count: int) -> None:
    for _ in range(count):
        with side.block() as conn:
            if conn.execute("SELECT 1").fetchone() != (1,):
                raise AssertionError("the server did not answer 1")


async def ask_engine(side: Side, count: int) -> None:
    for _ in range(count):
        async with side.block() as conn:
            if await conn.scalar(SELECT_1) != 1:
                raise AssertionError("the server did not answer 1")


def ask_engine_in_thread(side: Side, count: int) -> None:
    for _ in range(count):
        with side.block() as conn:
            if conn.scalar(SELECT_1) != 1:
                raise AssertionError("the server did not answer 1")


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
    """Runs bursts in some threads, which are there already."""

    def __init__(self, crew: ThreadPoolExecutor, number: int) -> None:
        self._crew = crew
        self.number = number

    def __call__(self, work: Callable[[Side, int], None], side: Side, each: int) -> float:
        begin = time.perf_counter()
        for done in [self._crew.submit(work, side, each) for _ in range(self.number)]:
            done.result()
        return time.perf_counter() - begin


class Bursts:
    """One side's bursts: each as long as it should be, judged by the last one."""

    def __init__(self, run: Tasks | Threads, work: Callable[[Side, int], Any], side: Side) -> None:
        self._run = run
        self._work = work
        self._side = side
        self._each = LEAST

    def __call__(self) -> float:
        """The operations per second of one more burst, each of them counted by the pool."""
        count = self._each * self._run.number
        self._side.pop()
        speed = count / self._run(self._work, self._side, self._each)
        self._side.check(count, contended=self._run.number > SIZE)
        self._each = max(LEAST, round(speed * BURST / self._run.number))
        return speed


def rounds(speeds: Mapping[str, Speed], number: int) -> dict[str, list[float]]:
    """The speed of each side: of the first two in each round, of the others in some."""
    found: dict[str, list[float]] = {name: [] for name in speeds}
    first, second, *others = speeds
    for turn in range(-5, number):  # the first ones warm up
        pair = (first, second) if turn % 2 else (second, first)
        for name in (*pair, *(others if turn % 5 == 0 else ())):
            speed = speeds[name]()
            if turn >= 0:
                found[name].append(speed)
    return found


def median(values: list[float], unit: str) -> Figure:
    """The median with its quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Figure(middle, unit, low, high)


def ratio(found: dict[str, list[float]], one: str, other: str) -> Figure:
    """How many times faster one side is than the other, round by round."""
    return median([a / b for a, b in zip(found[one], found[other], strict=True)], "times")


# -- the figures -------------------------------------------------------------------------------


class Trial(NamedTuple):
    """One way to use the pools, for all of them in the same rounds."""

    name: str
    run: Tasks | Threads
    work: Callable[[Side, int], Any]

    def rounds(self, sides: Mapping[str, Side], number: int) -> dict[str, list[float]]:
        """The speed of each side in each round."""
        speeds = {name: Bursts(self.run, self.work, side) for name, side in sides.items()}
        return rounds(speeds, number)

    def measure(self, report: Report, sides: Mapping[str, Side], number: int) -> None:
        """Report ours against psycopg_pool, and everybody's own speed."""
        found = self.rounds(sides, number)
        report.add(f"{self.name}_vs_psycopg_pool", ratio(found, "ours", "psycopg_pool"))
        for name, speeds in found.items():
            whose = self.name if name == "ours" else f"{name}_{self.name}"
            report.add(f"{whose}_ops_per_s", median(speeds, "/s"))


def measure_async(report: Report, url: str, number: int) -> None:
    with asyncio.Runner(debug=False) as runner, async_sides(url, runner) as sides:
        one, many = Tasks(runner), Tasks(runner, TASKS)
        alone = Trial("async_uncontended", one, take)
        alone.measure(report, sides, number)
        Trial("async_contended", many, take_and_hold).measure(report, sides, number)
        found = alone.rounds({"floor": Side(Floor().connection), "ours": sides["ours"]}, 2 * number)
        report.add("floor_vs_async_uncontended", ratio(found, "floor", "ours"))
        report.add("floor_ops_per_s", median(found["floor"], "/s"))
        Trial("select1_async", one, take_and_ask).measure(report, pair(sides), number)


def measure_threads(report: Report, url: str, number: int) -> None:
    with ThreadPoolExecutor(THREADS) as crew, thread_sides(url) as sides:
        run = Threads(crew, THREADS)
        Trial("threads", run, take_in_thread).measure(report, sides, number)
        asking = Trial("select1_threads", run, take_and_ask_in_thread)
        asking.measure(report, pair(sides), number)


def measure_engines(report: Report, url: str, number: int) -> None:
    """SQLAlchemy on a reservoir against SQLAlchemy on its own pool, with a query in each block."""
    with asyncio.Runner(debug=False) as runner, async_engines(url, runner) as sides:
        found = Trial("", Tasks(runner), ask_engine).rounds(sides, number)
    report.add("sqlalchemy_select1_vs_queuepool", ratio(found, "ours", "queuepool"))
    with ThreadPoolExecutor(THREADS) as crew, thread_engines(url) as sides:
        found = Trial("", Threads(crew, THREADS), ask_engine_in_thread).rounds(sides, number)
    report.add("sqlalchemy_select1_threads_vs_queuepool", ratio(found, "ours", "queuepool"))


def measure_asyncpg(report: Report, url: str, number: int) -> None:
    """Both with their reset query, which is most of what they do."""
    with asyncio.Runner(debug=False) as runner, asyncpg_sides(url, runner) as sides:
        found = Trial("", Tasks(runner), take).rounds(sides, number)
    report.add("asyncpg_uncontended_vs_asyncpg_pool", ratio(found, "ours", "asyncpg_pool"))


def pair(sides: Mapping[str, Side]) -> dict[str, Side]:
    """Those that have the same driver, so that a query costs both the same."""
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
        f"tasks that hold across a yield; {THREADS} threads; in brackets the quartiles; every "
        "checkout counted and every answer checked; asyncpg without its reset query, except in "
        "asyncpg_uncontended, where both reset"
    )


if __name__ == "__main__":
    main("pool", (__doc__ or "").splitlines()[0], measure)
