"""A deadline limits a whole operation, and raises only for its own expiry."""

from __future__ import annotations

import asyncio
import math

import pytest
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Deadline, DeadlineExceeded, MooredError
from moored.testing import simulate

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


def test_remaining_time_decreases_with_the_clock() -> None:
    clock = FakeClock()
    deadline = Deadline.after(5, clock)
    clock.advance(2)
    assert deadline.remaining() == 3.0
    assert deadline.timeout == 3.0
    assert not deadline.expired
    deadline.check()
    assert repr(deadline) == "<Deadline of 5 s, 3.0 s left>"


def test_an_expired_deadline_raises_with_the_numbers() -> None:
    clock = FakeClock()
    deadline = Deadline.after(5, clock)
    clock.advance(5.25)
    assert deadline.remaining() == 0.0
    assert deadline.expired
    assert repr(deadline) == "<Deadline of 5 s, expired>"
    with pytest.raises(DeadlineExceeded, match=r"^the login did not end within 5 s .*0.250 s"):
        deadline.check("the login")


def test_none_is_no_limit() -> None:
    deadline = Deadline.after(None)
    assert deadline.remaining() == math.inf
    assert deadline.timeout is None
    assert not deadline.expired
    deadline.check()
    assert repr(deadline) == "<Deadline never>"


def test_nan_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        Deadline.after(math.nan)


async def test_a_block_that_ends_in_time_is_not_cancelled() -> None:
    deadline = Deadline.after(60)
    async with deadline.enforce("work") as inner:
        assert inner is deadline
        await asyncio.sleep(0)
    async with Deadline.after(None).enforce():
        await asyncio.sleep(0)


async def test_a_block_that_takes_too_long_raises_deadline_exceeded() -> None:
    with pytest.raises(DeadlineExceeded, match=r"^opening the stream did not end within 0\.01"):
        async with Deadline.after(0.01).enforce("opening the stream"):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_of_an_expired_deadline_is_not_entered() -> None:
    clock = FakeClock()
    deadline = Deadline.after(1, clock)
    clock.advance(1)
    begun = False
    with pytest.raises(DeadlineExceeded):
        async with deadline.enforce():
            begun = True
    assert not begun


async def test_a_timeout_from_within_passes_through() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with Deadline.after(60).enforce():
            raise TimeoutError("of the driver")
    assert not isinstance(caught.value, MooredError)


async def test_the_blocks_own_timeout_is_kept_even_when_the_deadline_fired_too() -> None:
    async def driver() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TimeoutError("of the driver") from None

    with pytest.raises(TimeoutError) as caught:
        async with Deadline.after(0.01).enforce():
            await driver()
    assert str(caught.value) == "of the driver"


async def test_a_cancellation_from_outside_passes_through() -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with Deadline.after(60).enforce():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("outer", "inner", "fires"), [(60, 0.01, "inner"), (0.01, 60, "outer")])
async def test_of_two_nested_deadlines_the_earlier_one_fires(
    outer: float, inner: float, fires: str
) -> None:
    async def work() -> None:
        async with (
            Deadline.after(outer).enforce("the outer"),
            Deadline.after(inner).enforce("the inner"),
        ):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=f"^the {fires} did not"):
        await work()


def test_a_deadline_that_ended_a_block_is_expired_although_its_timer_fired_early() -> None:
    async def scenario(sim: object) -> None:
        deadline = Deadline.after(1)
        with pytest.raises(DeadlineExceeded, match=r"deadline was 0\.00[01] s ago"):
            async with deadline.enforce():
                await asyncio.Event().wait()
        assert deadline.expired

    simulate(scenario, 50, timer_slack=0.001)
