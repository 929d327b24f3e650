"""Tests of the example `pure_core`: its core directly, its shells in simulations and threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from examples.pure_core import AsyncGate, Gate, ThreadGate
from hypothesis import given
from hypothesis import strategies as st

from moored.testing import Sim, assert_caught, mutant, scaled, simulate, stress_threads

pytestmark = pytest.mark.pure

PERIOD = 0.5


def test_the_core_lets_callers_pass_in_order_as_tokens_arrive() -> None:
    gate: Gate[str] = Gate(burst=2, period=10.0, now=0.0)
    assert gate.arrive("a", now=1.0) == ["a"]
    assert gate.arrive("b", now=1.0) == ["b"]
    assert gate.arrive("c", now=1.0) == []
    assert gate.refill(now=9.9) == []
    assert gate.refill(now=10.0) == ["c"]


def test_a_token_of_a_caller_that_leaves_goes_to_the_next() -> None:
    gate: Gate[str] = Gate(burst=1, period=10.0, now=0.0)
    assert gate.arrive("a", now=0.0) == ["a"]
    assert gate.arrive("b", now=0.0) == []
    assert gate.arrive("c", now=0.0) == []
    assert gate.leave("b", now=5.0) == []
    assert gate.refill(now=10.0) == ["c"]
    assert gate.arrive("d", now=10.0) == []
    assert gate.leave("c", now=10.0) == ["d"], "c was let through, but did not go"


@given(st.lists(st.tuples(st.sampled_from(["arrive", "leave", "refill"]), st.integers(0, 30))))
def test_rate_and_order_hold_for_every_sequence_of_events(events: list[tuple[str, int]]) -> None:
    gate: Gate[int] = Gate(burst=3, period=10.0, now=0.0)
    passed: list[int] = []
    now = left = 0
    for number, (event, later) in enumerate(events):
        now += later
        if event == "arrive":
            passed += gate.arrive(number, now)
        elif event == "leave" and gate._waiting:
            left += 1
            passed += gate.leave(gate._waiting[0], now)
        else:
            passed += gate.refill(now)
        assert len(passed) <= 3 + now // 10
    assert passed == sorted(passed)
    assert len(passed) + left + len(gate._waiting) == sum(event == "arrive" for event, _ in events)


async def crowd(sim: Sim) -> None:
    """One token per period, more callers than tokens; some leave just when a token arrives."""
    times: list[float] = []

    async def visit(patience: float | None) -> None:
        await asyncio.sleep(sim.random(0, PERIOD / 2))
        try:
            async with asyncio.timeout_at(patience):
                await gate.enter()
        except TimeoutError:
            return
        times.append(sim.now)

    async with AsyncGate(burst=1, period=PERIOD) as gate:
        patient = [asyncio.create_task(visit(None)) for _ in range(10)]
        hasty = [asyncio.create_task(visit(n % 5 * PERIOD)) for n in range(10)]
        await asyncio.sleep(5.25 * PERIOD)
        # Some callers always wait, so every token has been used.
        assert len(times) == 6
        for task in (*patient, *hasty):
            task.cancel()
        await asyncio.wait((*patient, *hasty))
    assert all(time >= number * PERIOD for number, time in enumerate(times))


def lossy_leave(self: Gate[Any], caller: Any, now: float) -> list[Any]:
    """Lose the token of a caller that was let through already."""
    if caller in self._waiting:
        self._waiting.remove(caller)
    return self._decide(now)


def test_the_asyncio_shell_keeps_the_rate_in_every_schedule() -> None:
    simulate(crowd, scaled(1000))


def test_the_simulation_catches_a_lost_token() -> None:
    assert_caught(crowd, mutant(Gate, "leave", lossy_leave, name="a token lost by leave()"))


def test_the_thread_shell_lets_exactly_its_burst_pass() -> None:
    passed = threading.Semaphore(0)
    count = scaled(2000, least=200)
    with ThreadGate(burst=count // 2, period=60.0) as gate:

        def visit(thread: int, iteration: int) -> None:
            if gate.enter(timeout=0):
                passed.release()

        stress_threads(visit, threads=8, iterations=count // 8)
        assert sum(passed.acquire(blocking=False) for _ in range(count)) == count // 2
        assert not gate._core._waiting
