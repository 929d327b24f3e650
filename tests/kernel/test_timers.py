"""Named timers: one per name, never early, and never after a replacement."""

from __future__ import annotations

import asyncio

import pytest
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Clock, Timers, sleep_until
from moored.kernel import _timers as module
from moored.testing import Sim, assert_caught, mutant, run_one, simulate

pytestmark = pytest.mark.pure

SLACK = 0.001


@pytest.mark.every_loop(always=True)
async def test_callbacks_run_in_order_and_not_before_their_time() -> None:
    timers, clock = Timers(), Clock.current()
    begin, done = clock.monotonic(), asyncio.Event()
    fired: list[tuple[str, bool]] = []

    def note(name: str, after: float) -> None:
        fired.append((name, clock.monotonic() >= begin + after))
        if name == "last":
            done.set()

    for name, after in (("last", 0.0304), ("first", 0.0104), ("now", -1.0)):
        timers.set(name, begin + after, lambda name=name, after=after: note(name, after))  # type: ignore[misc]
    assert repr(timers) == "<Timers: 3 timers set: last, first, now>"
    assert fired == []
    async with asyncio.timeout(10):
        await done.wait()
    assert fired == [("now", True), ("first", True), ("last", True)]
    assert (len(timers), repr(timers)) == (0, "<Timers: 0 timers set>")


@pytest.mark.every_loop(always=True)
async def test_sleep_until_ends_when_the_clock_has_reached_the_time() -> None:
    clock = Clock.current()
    for step in range(10):
        at = clock.monotonic() + 0.0001 * (step + 3)
        await sleep_until(at)
        assert clock.monotonic() >= at


async def test_sleep_until_a_time_that_has_passed_yields_to_the_loop_once() -> None:
    ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(ran.set)
    await sleep_until(0.0)
    assert ran.is_set()


def test_setting_a_name_again_replaces_its_timer() -> None:
    async def scenario(sim: Sim) -> None:
        timers = Timers()
        fired: list[tuple[str, float]] = []
        timers.set("renewal", 1.0, lambda: fired.append(("first", sim.now)))
        timers.set("renewal", 5.0, lambda: fired.append(("second", sim.now)))
        timers.set("other", 2.0, lambda: fired.append(("other", sim.now)))
        assert timers.at("renewal") == 5.0
        await asyncio.sleep(10)
        assert fired == [("other", 2.0), ("second", 5.0)]
        assert timers.at("renewal") is None

    run_one(scenario, 1)


def test_a_cancelled_timer_never_fires_even_when_it_was_due_in_this_turn() -> None:
    async def scenario(sim: Sim) -> None:
        timers = Timers()
        fired: list[str] = []

        def first() -> None:
            fired.append("first")
            timers.cancel("second")
            timers.cancel("second")

        timers.set("first", 1.0, first)
        timers.set("second", 1.0, lambda: fired.append("second"))
        timers.set("third", 1.0, lambda: fired.append("third"))
        await asyncio.sleep(0.5)
        timers.set("fourth", 1.5, lambda: fired.append("fourth"))
        await asyncio.sleep(0.7)
        assert "fourth" in timers
        timers.cancel_all()
        assert not timers._armed
        await asyncio.sleep(5)
        assert fired == ["first", "third"]

    run_one(scenario, 1)


async def _beats(sim: Sim) -> None:
    """A callback that sets its own timer again: every beat comes, and none is early."""
    timers = Timers()
    beats: list[float] = []
    over = asyncio.Event()

    def beat() -> None:
        due = float(len(beats) + 1)
        assert sim.now >= due
        beats.append(sim.now)
        if len(beats) == 10:
            over.set()
        else:
            timers.set("beat", due + 1.0, beat)

    timers.set("beat", 1.0, beat)
    await over.wait()
    assert not timers._armed
    await sleep_until(12.3)
    assert sim.now >= 12.3


def test_timers_that_the_loop_fires_early_are_armed_again() -> None:
    simulate(_beats, 100, timer_slack=SLACK)


def test_the_simulation_notices_a_timer_that_is_not_armed_again() -> None:
    def fire_whenever(self: Timers, name: str, at: float, callback: object) -> None:
        del self._armed[name]
        if self._now() >= at:
            callback()  # type: ignore[operator]

    planted = mutant(Timers, "_fire", fire_whenever, name="an early timer is nothing to do")
    assert_caught(_beats, planted, timer_slack=SLACK)


def test_the_simulation_notices_a_sleep_that_ends_early() -> None:
    async def sleeps(at: float, clock: Clock | None = None) -> None:
        await asyncio.sleep(at - Clock.current().monotonic())

    async def scenario(sim: Sim) -> None:
        await module.sleep_until(3.0)
        assert sim.now >= 3.0

    planted = mutant(module, "sleep_until", sleeps, name="one sleep is enough")
    assert_caught(scenario, planted, timer_slack=SLACK)


async def test_deadlines_are_in_the_seconds_of_the_given_clock() -> None:
    clock = FakeClock()
    timers, fired = Timers(clock), asyncio.Event()
    timers.set("tick", clock.monotonic() + 0.01, fired.set)
    asyncio.get_running_loop().call_later(0.02, clock.advance, 0.01)
    async with asyncio.timeout(10):
        await fired.wait()
    assert len(timers) == 0


async def test_a_callback_that_fails_is_reported_and_its_name_is_free() -> None:
    reported = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.set_result(context["exception"])
    )
    timers = Timers()

    def fail() -> None:
        raise LookupError("broken callback")

    timers.set("broken", 0.0, fail)
    async with asyncio.timeout(10):
        assert isinstance(await reported, LookupError)
    assert "broken" not in timers
