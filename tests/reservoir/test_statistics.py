"""The statistics of reservoirs and pools."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import (
    Conn,
    Journal,
    Server,
    SqlError,
    caller,
    filled,
    pool_of,
    reservoir,
    wait_until,
)

from moored.reservoir import (
    PoolOverloaded,
    PoolTimeout,
    ReservoirConfig,
    ReservoirEmpty,
    Statistics,
)
from moored.reservoir._core import Core
from moored.reservoir._statistics import BUCKETS, Latency
from moored.testing import Sim, scaled

pytestmark = pytest.mark.pure

# -- latency -------------------------------------------------------------------------------------


def test_waits_are_sorted_into_buckets() -> None:
    assert BUCKETS[:3] == (0.0001, 0.00014, 0.0002)
    assert {0.0001, 0.001, 0.01, 0.1, 1.0, 10.0} < set(BUCKETS)
    latency = Latency()
    for seconds in (0.0, 0.0001, 0.00011, 0.5, 1.0, 10.0, 10.1, 1000.0):
        latency.add(seconds)
    found = dict(zip((*BUCKETS, "more"), latency.counts, strict=True))
    assert {end: number for end, number in found.items() if number} == {
        0.0001: 2,
        0.00014: 1,
        0.56: 1,
        1.0: 1,
        10.0: 1,
        "more": 2,
    }


def test_the_buckets_of_waits_are_at_most_half_an_octave_wide() -> None:
    assert all(end / begin < 1.44 for begin, end in pairwise(BUCKETS))


@given(st.lists(st.floats(0.0, 100.0)))
def test_each_wait_is_counted_in_one_bucket(waits: list[float]) -> None:
    latency = Latency()
    for seconds in waits:
        latency.add(seconds)
    assert sum(latency.counts) == len(waits)
    for place, end in enumerate(BUCKETS):
        assert sum(latency.counts[: place + 1]) == sum(wait <= end for wait in waits)


def _waits(now: Statistics, least: float, most: float) -> int:
    """Return how many callers have waited for longer than this, and at most that."""
    return sum(now.latency[BUCKETS.index(least) + 1 : BUCKETS.index(most) + 1])


# -- sizes ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_statistics_of_a_new_reservoir(sim: Sim) -> None:
    now = reservoir(Server(), ReservoirConfig(max_size=7, target_ready=3)).statistics()
    assert isinstance(now, Statistics)
    assert (now.size, now.in_use, now.in_flight, now.closing) == (0, 0, 0, 0)
    assert (now.target, now.max_size, now.waiting, now.overloaded) == (3, 7, 0, False)
    assert (now.checkouts, now.refills, dict(now.discards)) == (0, 0, {})
    assert sum(now.latency) == 0
    assert len(now.latency) == len(BUCKETS) + 1


@in_virtual_time
async def test_statistics_count_ready_in_use_and_opening_connections(sim: Sim) -> None:
    server = Server()
    async with reservoir(server, ReservoirConfig(max_size=4)) as water:
        await asyncio.sleep(0.005)
        assert water.statistics().in_flight == 4
        await wait_until(lambda: water.statistics().size == 4)
        conn = water.try_checkout()
        other = water.try_checkout()
        now = water.statistics()
        assert (now.size, now.in_use, now.in_flight) == (2, 2, 0)
        assert (now.refills, now.checkouts, now.returns) == (4, 2, 0)
        assert now.refill_seconds == pytest.approx(0.04)
        await asyncio.sleep(3.0)
        water.give_back(conn)
        now = water.statistics()
        assert (now.size, now.in_use, now.returns) == (3, 1, 1)
        assert now.usage_seconds == pytest.approx(3.0, abs=0.1)
        water.give_back(other)


@in_virtual_time
async def test_an_empty_reservoir_is_counted(sim: Sim) -> None:
    server = Server()
    server.takes = 5.0
    async with reservoir(server) as water:
        for _ in range(3):
            with pytest.raises(ReservoirEmpty):
                water.try_checkout()
        now = water.statistics()
        assert (now.empty, now.checkouts) == (3, 0)


@in_virtual_time
async def test_discards_and_failures_by_reason(sim: Sim) -> None:
    server = Server()
    server.script.extend([None, SqlError("53400"), SqlError(None)])
    async with reservoir(server) as water:
        await wait_until(lambda: water.statistics().size)
        water.give_back(water.try_checkout(), bad=True)
        await wait_until(lambda: water.statistics().size)
        now = water.statistics()
        assert dict(now.discards) == {"bad": 1}
        assert dict(now.refill_failures) == {"connect": 2}
        assert now.refills == 2
        with pytest.raises(TypeError):
            now.discards["bad"] = 5  # type: ignore[index]


@in_virtual_time
async def test_statistics_report_leases_and_rate_tokens(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    config = ReservoirConfig(max_size=3, rate=10.0, burst=6)
    async with journal.leases() as leases, reservoir(server, config, leases=leases) as water:
        await wait_until(lambda: water.statistics().size == 3)
        now = water.statistics()
        assert now.leases_held == 3 == leases.statistics().held
        # The store's burst is the half of six, and three were used a moment ago.
        assert 0.0 <= now.rate_tokens_left < 1.0
        await asyncio.sleep(5.0)
        assert water.statistics().rate_tokens_left == 3.0
        conn = water.try_checkout()
        assert water.statistics().leases_held == 3
        water.discard(conn)
        assert water.statistics().leases_held == 2


@in_virtual_time
async def test_before_the_first_connect_the_burst_is_left(sim: Sim) -> None:
    assert reservoir(Server(), ReservoirConfig(burst=7)).statistics().rate_tokens_left == 7.0
    assert reservoir(Server(), ReservoirConfig(rate=20.0)).statistics().rate_tokens_left == 20.0


# -- callers -------------------------------------------------------------------------------------


@in_virtual_time
async def test_statistics_count_waiters_and_their_waits(sim: Sim) -> None:
    server = Server()
    async with pool_of(server) as pool:
        await wait_until(lambda: pool.statistics().size)
        conn = await pool.getconn()
        waiting = asyncio.create_task(pool.getconn())
        await asyncio.sleep(0.5)
        assert pool.statistics().waiting == 1
        await pool.putconn(conn)
        await pool.putconn(await waiting)
        now = pool.statistics()
        assert (now.checkouts, now.queued, now.waiting, now.empty) == (2, 1, 0, 1)
        assert now.wait_seconds == pytest.approx(0.5, abs=0.01)
        assert (now.latency[0], _waits(now, 0.1, 1.0), sum(now.latency)) == (1, 1, 2)


@in_virtual_time
async def test_statistics_count_timeouts_and_refusals(sim: Sim) -> None:
    server = Server()
    async with pool_of(server, max_waiting=1) as pool:
        await wait_until(lambda: pool.statistics().size)
        conn = await pool.getconn()
        waiting = asyncio.create_task(pool.getconn(timeout=2.0))
        await asyncio.sleep(0.1)
        with pytest.raises(PoolOverloaded, match="max_waiting=1"):
            await pool.getconn()
        with pytest.raises(PoolTimeout):
            await waiting
        now = pool.statistics()
        assert (now.refused, now.timeouts, now.checkouts) == (1, 1, 1)
        assert now.wait_seconds == pytest.approx(2.0)
        assert sum(now.latency) == 1, "only those who got one"
        await pool.putconn(conn)


@in_virtual_time
async def test_a_failed_check_is_counted_and_no_counter_decreases(sim: Sim) -> None:
    server = Server()
    bad: set[Conn] = set()

    async def check(conn: Conn) -> None:
        if conn in bad:
            raise OSError("no answer")

    async with pool_of(server, check=check) as pool:
        await wait_until(lambda: pool.statistics().size)
        first = await pool.getconn()
        bad.add(first)
        waiting = asyncio.create_task(pool.getconn())
        await asyncio.sleep(0.5)
        await pool.putconn(first)
        second = await waiting
        assert second is not first
        now = pool.statistics()
        assert dict(now.discards) == {"failed_check": 1}
        assert (now.checkouts, now.in_use, now.returns) == (3, 1, 2)
        assert (now.latency[0], _waits(now, 0.1, 1.0), sum(now.latency)) == (1, 2, 3)
        assert pool.get_stats()["requests_num"] == 2
        await pool.putconn(second)


@in_virtual_time
async def test_check_counts_no_checkouts(sim: Sim) -> None:
    server = Server()
    bad: list[Conn] = []

    async def ping(conn: Conn) -> None:
        bad.append(conn)
        raise OSError("no answer")

    async with pool_of(server, max_size=3, ping=ping) as pool:
        await wait_until(lambda: pool.statistics().size == 3)
        await pool.check()
        now = pool.statistics()
        assert len(bad) == 3
        assert dict(now.discards) == {"failed_check": 3}
        assert (now.checkouts, now.returns, sum(now.latency)) == (0, 0, 0)


# -- from another thread -------------------------------------------------------------------------


@pytest.fixture
def hectic() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hectic")
def test_statistics_may_be_read_by_any_thread_under_load() -> None:
    """As the scrape of a pool for asyncio does, whose loop takes no lock to give one back."""
    water = reservoir(Server(), ReservoirConfig(max_size=50))
    water.state = "open"
    core: Core[Conn] = water.core
    done = threading.Event()
    errors: list[Exception] = []

    def ask() -> None:
        while not done.is_set():
            try:
                water.statistics()
                water.whereabouts()
                repr(water)
            except Exception as error:
                errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(scaled(2000, least=200)):
        for item in filled(50, core=core)[1]:
            core.leave(caller(core, 0.0), 0.0)
            core.discard(item, "bad")
            core.closed()
        core.retired.clear()
    done.set()
    asking.join()
    assert errors == []
