"""When the queue counts as overloaded: a target of 5 s, an interval of 10 s."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import Server, pool_of, wait_until

from moored.reservoir import PoolOverloaded
from moored.reservoir._overload import Overload
from moored.testing import Sim

pytestmark = pytest.mark.pure


def told(*served: tuple[float, float]) -> Overload:
    """The state after these (time, wait)."""
    overload = Overload(5.0, 10.0)
    for now, waited in served:
        overload.served(waited, now)
    return overload


def test_an_interval_in_which_all_waited_too_long_is_an_overload() -> None:
    overload = told((0.0, 6.0), (4.0, 6.0), (9.9, 6.0))
    assert not overload.overloaded, "the interval is not over"
    overload.served(6.0, 10.0)
    assert overload.overloaded


def test_the_target_itself_is_not_too_long() -> None:
    assert not told((0.0, 5.0), (10.0, 5.0), (20.0, 5.0)).overloaded
    assert told((0.0, 5.001), (10.0, 5.001)).overloaded


def test_one_short_wait_in_the_interval_is_enough() -> None:
    assert not told((0.0, 6.0), (5.0, 5.0), (9.0, 60.0), (10.0, 60.0)).overloaded


def test_only_the_last_interval_counts() -> None:
    assert told((0.0, 0.0), (10.0, 6.0), (19.0, 6.0), (20.0, 6.0)).overloaded


def test_the_first_short_wait_ends_the_overload() -> None:
    overload = told((0.0, 6.0), (10.0, 6.0))
    assert overload.overloaded
    overload.served(5.0, 10.5)
    assert not overload.overloaded


def test_an_overload_lasts_until_a_short_wait() -> None:
    overload = told((0.0, 6.0), *((10.0 + 2.0 * n, 6.0) for n in range(20)))
    assert overload.overloaded


def test_a_time_without_callers_is_no_overload() -> None:
    assert not told((0.0, 0.0), (1000.0, 6.0)).overloaded
    assert not told((1000.0, 6.0), (1009.0, 6.0)).overloaded


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0))))
def test_without_long_waits_there_is_no_overload(events: list[tuple[float, float]]) -> None:
    overload, now = Overload(5.0, 10.0), 0.0
    for later, waited in events:
        now += later
        overload.served(waited, now)
        assert not overload.overloaded


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=12))
def test_with_long_waits_only_there_is_an_overload(steps: list[float]) -> None:
    overload, now = Overload(5.0, 10.0), 0.0
    for step in steps:
        now += step
        overload.served(5.1, now)
    assert overload.overloaded == (now >= steps[0] + 10.0)


@in_virtual_time
async def test_an_overloaded_pool_refuses_new_callers_at_once(sim: Sim) -> None:
    """One connection, held for 2 s by each of ten callers at a time: each waits for 18 s."""
    server = Server()
    refused: list[float] = []
    served: list[float] = []

    async def work() -> None:
        for _ in range(3):
            try:
                async with pool.connection():
                    served.append(sim.now)
                    await asyncio.sleep(2.0)
            except PoolOverloaded:
                refused.append(sim.now)
                await asyncio.sleep(5.0)

    async with pool_of(server, timeout=60.0) as pool:
        await wait_until(lambda: pool.statistics().size == 1)
        await asyncio.gather(*(work() for _ in range(10)))
        # The first two of them waited less than the target. From then on nobody did: one interval
        # begins with the first that is served after the last short wait's one has ended.
        assert refused, "no caller was refused"
        assert min(refused) > 15.0
        assert pool.statistics().refused == len(refused)
        assert len(served) + len(refused) == 30
        # It clears when the queue is short again.
        async with asyncio.timeout(1.0):
            async with pool.connection():
                assert not pool.statistics().overloaded


@in_virtual_time
async def test_a_caller_with_a_timeout_of_its_own_joins_a_slow_queue(sim: Sim) -> None:
    async with pool_of(queue_target=0.5, queue_interval=1.0, timeout=300.0) as pool:

        async def work(timeout: float | None) -> None:
            async with pool.connection(timeout):
                await asyncio.sleep(1.0)

        first = [asyncio.create_task(work(None)) for _ in range(20)]
        await wait_until(lambda: pool.statistics().overloaded)
        with pytest.raises(PoolOverloaded):
            await work(None)
        await asyncio.gather(work(300.0), *first)
        assert pool.statistics().refused == 1


@in_virtual_time
async def test_an_infinite_target_turns_the_refusal_off(sim: Sim) -> None:
    async with pool_of(queue_target=math.inf, queue_interval=1.0, timeout=300.0) as pool:

        async def work() -> None:
            async with pool.connection():
                await asyncio.sleep(1.0)

        first = [asyncio.create_task(work()) for _ in range(20)]
        await asyncio.sleep(10.0)
        await asyncio.gather(work(), *first)
        assert pool.statistics().refused == 0


@in_virtual_time
async def test_the_error_of_an_overload_says_why(sim: Sim) -> None:
    server = Server()
    async with pool_of(server) as pool:
        await wait_until(lambda: pool.statistics().size == 1)
        held = await pool.getconn()
        waiting = {asyncio.create_task(pool.getconn(timeout=60.0)) for _ in range(5)}
        for _ in range(4):
            await asyncio.sleep(6.0)
            await pool.putconn(held)
            done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
            held = done.pop().result()
        with pytest.raises(PoolOverloaded, match=r"longer than queue_target.*1 of 1 in use"):
            await pool.getconn()
        await pool.putconn(held)
        await pool.putconn(await waiting.pop())
