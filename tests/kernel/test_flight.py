"""Concurrent callers share one attempt, and a cancelled caller does not affect the others."""

from __future__ import annotations

import asyncio
import contextvars
import gc

import pytest

from moored.kernel import FlightCancelled, SingleFlight
from moored.testing import Sim, scaled, simulate

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


class Attempts:
    """Counts the attempts and lets the test decide how each one ends."""

    def __init__(self) -> None:
        self.count = 0
        self.running = 0
        self.most = 0
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.tidy = asyncio.Event()
        self.tidy.set()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return number
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            await self.tidy.wait()
            raise
        finally:
            self.running -= 1


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_callers_share_one_attempt() -> None:
    flight, attempts = SingleFlight(), Attempts()
    callers = [asyncio.create_task(flight.do("k", attempts)) for _ in range(10)]
    await turns()
    assert repr(flight) == "<SingleFlight: 1 in flight, 10 callers>"
    assert "k" in flight
    attempts.gate.set()
    assert await asyncio.gather(*callers) == [1] * 10
    assert attempts.count == 1
    assert len(flight) == 0


async def test_a_call_after_the_end_is_a_new_attempt() -> None:
    flight, attempts = SingleFlight(), Attempts()
    attempts.gate.set()
    assert [await flight.do("k", attempts) for _ in range(3)] == [1, 2, 3]


async def test_a_call_in_the_loop_iteration_of_the_end_is_a_new_attempt() -> None:
    flight, ending = SingleFlight(), asyncio.Event()

    async def first() -> str:
        # Wakes the latecomer to run after this task's end, and before asyncio's callbacks of it.
        ending.set()
        return "first"

    async def second() -> str:
        return "second"

    async def latecomer() -> str:
        await ending.wait()
        return await flight.do("k", second)

    late = asyncio.create_task(latecomer())
    await turns()
    assert await flight.do("k", first) == "first"
    assert await late == "second"


async def test_keys_do_not_wait_for_each_other() -> None:
    flight, blocked, free = SingleFlight(), Attempts(), Attempts()
    free.gate.set()
    waiting = asyncio.create_task(flight.do("a", blocked))
    await turns()
    assert await flight.do("b", free) == 1
    blocked.gate.set()
    assert await waiting == 1


async def test_a_failure_is_shared() -> None:
    flight, attempts = SingleFlight(), Attempts()
    attempts.error = ConnectionError("refused")
    callers = [asyncio.create_task(flight.do("k", attempts)) for _ in range(3)]
    await turns()
    attempts.gate.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert outcomes == [attempts.error] * 3
    assert len(flight) == 0


async def test_a_factory_that_raises_at_once_fails_its_callers_only() -> None:
    flight = SingleFlight()

    def broken() -> asyncio.Future[int]:
        raise ValueError("no such host")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such host"):
            await flight.do("k", broken)
    assert len(flight) == 0


async def test_a_cancelled_caller_does_not_cancel_the_others() -> None:
    flight, attempts = SingleFlight(), Attempts()
    first, second = [asyncio.create_task(flight.do("k", attempts)) for _ in range(2)]
    await turns()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    attempts.gate.set()
    assert await second == 1
    assert attempts.ended == []


async def test_when_the_last_caller_is_cancelled_so_is_the_attempt() -> None:
    flight, attempts = SingleFlight(), Attempts()
    callers = [asyncio.create_task(flight.do("k", attempts)) for _ in range(3)]
    await turns()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    assert all(caller.cancelled() for caller in callers)
    assert attempts.ended == ["cancelled"]
    assert attempts.running == 0
    assert len(flight) == 0


async def test_a_new_caller_waits_for_the_end_of_a_cancelled_attempt() -> None:
    flight, attempts = SingleFlight(), Attempts()
    attempts.tidy.clear()
    leaving = asyncio.create_task(flight.do("k", attempts))
    await turns()
    leaving.cancel()
    await turns()
    newcomer = asyncio.create_task(flight.do("k", attempts))
    await turns()
    assert attempts.count == 1
    assert not leaving.done()
    attempts.gate.set()
    attempts.tidy.set()
    assert await newcomer == 2
    assert leaving.cancelled()
    assert attempts.most == 1


async def test_a_caller_that_is_cancelled_twice_does_not_wait() -> None:
    flight, attempts = SingleFlight(), Attempts()
    attempts.tidy.clear()
    leaving = asyncio.create_task(flight.do("k", attempts))
    await turns()
    leaving.cancel()
    await turns()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert "k" in flight
    attempts.tidy.set()
    await turns()
    assert "k" not in flight


async def test_an_attempt_cancelled_before_its_first_step_leaves_nothing() -> None:
    flight, attempts = SingleFlight(), Attempts()
    caller = asyncio.create_task(flight.do("k", attempts))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(flight) == 0


async def test_an_attempt_cancelled_from_elsewhere_is_an_error_not_a_cancellation() -> None:
    flight = SingleFlight()

    async def gives_in() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return 1

    with pytest.raises(FlightCancelled, match=r"'k' was cancelled, and not by its callers"):
        await flight.do("k", gives_in)


async def test_an_attempt_that_waits_for_itself_raises() -> None:
    flight = SingleFlight()

    async def selfish() -> int:
        return await flight.do("k", selfish)

    with pytest.raises(RuntimeError, match="waits for itself"):
        await flight.do("k", selfish)


async def test_an_error_without_waiters_is_not_logged_as_never_retrieved() -> None:
    flight, complaints = SingleFlight(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    stubborn = asyncio.Event()

    async def fails_when_cancelled() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stubborn.wait()
            raise ValueError("late") from None
        return 1

    caller = asyncio.create_task(flight.do("k", fails_when_cancelled))
    await turns()
    caller.cancel()
    await turns()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    stubborn.set()
    await turns()
    gc.collect()
    assert complaints == []


async def test_the_attempt_has_the_first_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    flight, gate = SingleFlight(), asyncio.Event()

    async def read() -> str:
        await gate.wait()
        return variable.get()

    async def call(value: str) -> str:
        variable.set(value)
        return await flight.do("k", read)

    callers = [asyncio.create_task(call(value)) for value in ("first", "second")]
    await turns()
    gate.set()
    assert await asyncio.gather(*callers) == ["first", "first"]


def test_attempts_never_overlap_however_callers_follow_each_other() -> None:
    """A new attempt may start between the end of the last one and its done callback."""

    async def scenario(sim: Sim) -> None:
        flights, running, most = SingleFlight(), 0, 0

        async def attempt() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(sim.rng.randrange(3)):
                await asyncio.sleep(0)
            running -= 1

        async def caller() -> None:
            for _ in range(10):
                await flights.do("key", attempt)
                for _ in range(sim.rng.randrange(3)):
                    await asyncio.sleep(0)

        await asyncio.gather(*(caller() for _ in range(4)))
        assert most == 1
        assert len(flights) == 0

    simulate(scenario, scaled(1000, least=40))
