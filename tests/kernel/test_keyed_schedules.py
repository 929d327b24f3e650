"""Keyed workers in simulated schedules: order holds and every item has an outcome."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from moored.kernel import (
    KeyedStatistics,
    KeyedWorkers,
    QueueFull,
    WorkCancelled,
    WorkerCrashed,
)
from moored.testing import Sim, scaled, simulate

pytestmark = pytest.mark.pure

KEYS = "abc"


class Broken(Exception):
    """The error that a handler raises."""


class Office:
    """Handlers that are slow, fail, or resist cancellation, and notice when they overlap."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.started: defaultdict[str, list[int]] = defaultdict(list)
        self.busy: set[str] = set()

    async def __call__(self, key: str, number: int) -> int:
        assert key not in self.busy, f"two items of {key} at once"
        self.busy.add(key)
        self.started[key].append(number)
        try:
            return await self._work(number)
        except asyncio.CancelledError:
            await asyncio.sleep(self.sim.random(0, 0.1))
            raise
        finally:
            self.busy.remove(key)

    async def _work(self, number: int) -> int:
        fate = self.sim.rng.random()
        if fate < 0.5:
            await asyncio.sleep(self.sim.random(0, 0.2))
        elif fate < 0.7:
            await asyncio.sleep(0)
        if self.sim.rng.random() < 0.1:
            raise Broken(number)
        return number


async def anything_goes(sim: Sim) -> None:
    office = Office(sim)
    workers: KeyedWorkers[str, int, int] = KeyedWorkers(office, max_queue=5)
    submitted: defaultdict[str, list[int]] = defaultdict(list)
    outcomes: defaultdict[str, int] = defaultdict(int)
    numbers = iter(range(1000))

    async def caller(key: str) -> None:
        for _ in range(8):
            await asyncio.sleep(sim.random(0, 0.3))
            number = next(numbers)
            try:
                future = workers.submit(key, number)
            except QueueFull:
                outcomes["full"] += 1
                continue
            submitted[key].append(number)
            outcomes[await outcome(future, number)] += 1

    async def outcome(future: asyncio.Future[int], number: int) -> str:
        # A wait_for that gives up cancels the future: the item is skipped or abandoned.
        try:
            async with asyncio.timeout(sim.random(0, 1.0) if sim.rng.random() < 0.2 else None):
                assert await future == number
        except (Broken, WorkerCrashed, WorkCancelled, TimeoutError) as error:
            return type(error).__name__
        return "done"

    async def vandal() -> None:
        for _ in range(3):
            await asyncio.sleep(sim.random(0, 1))
            workers.cancel(sim.rng.choice([*KEYS, None]))

    callers = [caller(key) for key in KEYS for _ in range(3)]
    await asyncio.gather(*callers, vandal())
    await workers.drain()
    for key in KEYS:
        order = [submitted[key].index(number) for number in office.started[key]]
        assert order == sorted(order), f"{key}: {office.started[key]} of {submitted[key]}"
    check(workers.statistics(), outcomes)


def check(counts: KeyedStatistics, outcomes: dict[str, int]) -> None:
    left = outcomes["TimeoutError"]
    assert (counts.keys, counts.queued) == (0, 0)
    assert counts.submitted == sum(counts[4:]) == sum(outcomes.values()) - outcomes["full"]
    assert counts.rejected == outcomes["full"]
    for counted, seen in (
        (counts.completed, outcomes["done"]),
        (counts.failed, outcomes["Broken"]),
        (counts.crashed, outcomes["WorkerCrashed"]),
        (counts.cancelled, outcomes["WorkCancelled"]),
    ):
        assert seen <= counted <= seen + left


def test_order_and_outcomes_hold_in_every_schedule() -> None:
    simulate(anything_goes, scaled(2000))


def test_order_and_outcomes_hold_on_a_busy_machine() -> None:
    simulate(anything_goes, scaled(500), lateness=0.05, timer_slack=0.001)
