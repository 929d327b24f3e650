"""The simulated loop: virtual time, the order of callbacks and tasks, and the teardown."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import threading
from functools import partial
from typing import Any

import pytest

from moored.kernel._clock import Clock
from moored.testing import (
    Deadlock,
    Livelock,
    Outcome,
    Sim,
    SimLoop,
    SimulationFailed,
    TimeLimit,
    Unretrieved,
    Unsimulated,
    run_one,
    scaled,
    simulate,
)
from moored.testing._loop import EPOCH

pytestmark = pytest.mark.pure

SEEDS = range(scaled(200, least=50))


def test_a_day_of_virtual_time_takes_no_real_time() -> None:
    async def scenario(sim: Sim) -> float:
        await asyncio.sleep(86_400)
        return sim.now

    assert run_one(scenario, 1, time_limit=100_000).result() == 86_400.0


def test_the_clock_of_the_loop_is_the_current_clock() -> None:
    async def scenario(sim: Sim) -> tuple[float, float, float]:
        clock = Clock.current()
        await asyncio.sleep(1.5)
        assert Clock.current() is clock
        return clock.monotonic(), clock.wall(), clock.random.random()

    monotonic, wall, chance = run_one(scenario, 7).result()
    assert (monotonic, wall) == (1.5, EPOCH + 1.5)
    assert run_one(scenario, 7).result()[2] == chance != run_one(scenario, 8).result()[2]


def test_timers_with_equal_deadlines_fire_in_the_order_they_were_set() -> None:
    async def scenario(sim: Sim) -> list[int]:
        fired: list[int] = []
        for number in range(50):
            sim.loop.call_at(1.0, fired.append, number)
        await asyncio.sleep(2)
        return fired

    for seed in range(20):
        assert run_one(scenario, seed).result() == list(range(50))


def test_cancelled_timers_do_not_fire() -> None:
    async def scenario(sim: Sim) -> None:
        fired: list[int] = []
        timers = [sim.loop.call_later(30, fired.append, n) for n in range(1000)]
        for timer in timers[1:]:
            timer.cancel()
        await asyncio.sleep(31)
        assert fired == [0]

    run_one(scenario, 1)


def test_callbacks_keep_their_order_whatever_the_seed() -> None:
    async def scenario(sim: Sim) -> list[int]:
        called: list[int] = []

        async def schedule(first: int) -> None:
            for number in range(first, first + 10):
                sim.loop.call_soon(called.append, number)

        await schedule(0)
        await asyncio.create_task(schedule(10))
        await asyncio.sleep(0.1)
        return called

    for seed in SEEDS:
        assert run_one(scenario, seed).result() == list(range(20))


def test_done_callbacks_run_before_a_task_that_awaits_the_same_future() -> None:
    async def scenario(sim: Sim) -> None:
        seen: list[str] = []

        async def work() -> None:
            await asyncio.sleep(1)

        async def wait(task: asyncio.Task[None]) -> None:
            await task
            assert seen == ["first", "second"]

        task = asyncio.create_task(work())
        task.add_done_callback(lambda _: seen.append("first"))
        task.add_done_callback(lambda _: seen.append("second"))
        await asyncio.gather(*(wait(task) for _ in range(5)))

    for seed in SEEDS:
        run_one(scenario, seed).result()


async def _race(sim: Sim) -> str:
    order: list[str] = []

    async def step(name: str) -> None:
        await asyncio.sleep(1)
        order.append(name)

    await asyncio.gather(*(step(name) for name in "abc"))
    return "".join(order)


def test_drift_lets_tasks_overtake_each_other() -> None:
    orders: set[str] = set()
    for seed in range(1000):
        orders.add(run_one(_race, seed).result())
        if len(orders) == 6:
            break
    assert len(orders) == 6, "every order of three tasks should be found"


def test_without_drift_the_order_is_that_of_asyncio() -> None:
    assert {run_one(_race, seed, drift=False).result() for seed in SEEDS} == {"abc"}


def test_drift_leaves_virtual_times_exact_and_lateness_does_not() -> None:
    async def scenario(sim: Sim) -> float:
        await asyncio.gather(*(asyncio.sleep(1) for _ in range(5)))
        return sim.now

    assert {run_one(scenario, seed).result() for seed in range(50)} == {1.0}
    late = [run_one(scenario, seed, lateness=0.01).result() for seed in range(50)]
    assert len(set(late)) > 10
    assert all(1.0 <= each <= 1.1 for each in late)


def test_timer_slack_fires_timers_before_and_after_their_deadline() -> None:
    async def scenario(sim: Sim) -> float:
        await asyncio.sleep(1)
        return sim.now

    times = [run_one(scenario, seed, timer_slack=0.001).result() for seed in range(50)]
    assert min(times) < 1.0 < max(times)
    assert all(0.999 <= each <= 1.001 for each in times)
    assert times == [run_one(scenario, seed, timer_slack=0.001).result() for seed in range(50)]


def test_time_never_goes_back_with_timer_slack() -> None:
    async def scenario(sim: Sim) -> None:
        fired: list[float] = []
        for number in range(100):
            sim.loop.call_later(number / 10_000, lambda: fired.append(sim.now))
        await asyncio.sleep(0.1)
        assert len(fired) == 100
        assert fired == sorted(fired)

    for seed in SEEDS:
        run_one(scenario, seed, timer_slack=0.001)


def test_timer_slack_finds_code_that_does_not_rearm_an_early_timer() -> None:
    """On uvloop a timer may fire early: code that is woken before its deadline must wait again."""

    async def scenario(sim: Sim, *, rearms: bool = False) -> None:
        loop, expired = sim.loop, asyncio.Event()
        deadline = sim.now + 5.0

        def check() -> None:
            if sim.now >= deadline:
                expired.set()
            elif rearms:
                loop.call_at(deadline, check)

        loop.call_at(deadline, check)
        await expired.wait()

    simulate(scenario, 100)
    with pytest.raises(SimulationFailed) as failed:
        simulate(scenario, 100, timer_slack=0.001)
    assert isinstance(failed.value.__cause__, Deadlock)
    simulate(partial(scenario, rearms=True), scaled(500, least=100), timer_slack=0.001)


def test_timer_slack_does_not_affect_the_network() -> None:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async def scenario(sim: Sim) -> float:
        await sim.serve(hello)
        sim.network.slow("server", latency=(1.0, 1.0))
        reader, writer = await asyncio.open_connection("server", 8000)
        assert await reader.read() == b"hello"
        writer.close()
        return sim.now

    assert run_one(scenario, 1, timer_slack=0.001).result() == run_one(scenario, 1).result()


def test_a_callback_that_is_cancelled_before_its_turn_does_not_run() -> None:
    async def scenario(sim: Sim) -> None:
        called: list[int] = []
        handles = [sim.loop.call_soon(called.append, number) for number in range(3)]
        handles[1].cancel()
        await asyncio.sleep(1)
        assert called == [0, 2]

    for seed in range(20):
        run_one(scenario, seed)


def test_bytes_keep_their_order_with_timer_slack() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()

    async def scenario(sim: Sim) -> None:
        await sim.serve(echo)
        reader, writer = await asyncio.open_connection("server", 8000)
        sent = b"".join(b"%d," % number for number in range(200))
        for start in range(0, len(sent), 50):
            writer.write(sent[start : start + 50])
            await asyncio.sleep(0.0005)
        assert await reader.readexactly(len(sent)) == sent
        writer.close()

    simulate(scenario, scaled(400), timer_slack=0.001)


def test_the_seed_alone_decides_the_order_in_which_a_task_group_cancels() -> None:
    async def scenario(sim: Sim) -> tuple[int, ...]:
        cancelled: list[int] = []

        async def member(number: int) -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        async def leader() -> None:
            await asyncio.sleep(1)
            raise LookupError

        async def group_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(member(number))
                group.create_task(leader())

        with pytest.raises(ExceptionGroup):
            await group_of_them()
        return tuple(cancelled)

    ballast: list[Any] = []
    for seed in range(10):
        first = run_one(scenario, seed, check=False)
        ballast.append([object() for _ in range(997)])  # other addresses for the next run
        second = run_one(scenario, seed, check=False)
        assert first.result() == second.result()
        assert first.digest == second.digest


def _error(outcome: Outcome[Any]) -> str:
    assert outcome.error is not None
    return str(outcome.error)


def test_a_deadlock_lists_what_each_task_awaits() -> None:
    async def scenario(sim: Sim) -> None:
        never = asyncio.Event()

        async def ticks() -> Any:
            yield 1
            await never.wait()

        async def reader() -> None:
            async for _ in ticks():
                pass

        await asyncio.create_task(reader(), name="reader")

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Deadlock)
    text = _error(outcome)
    assert "no task is ready and no timer is set at 0.000000 s" in text
    assert "scenario  waits on  task reader" in text
    assert "reader  waits on  <asyncio.locks.Event object" in text
    assert "in test_a_deadlock_lists_what_each_task_awaits.<locals>.scenario.<locals>.ticks" in text


def test_a_task_that_never_sleeps_is_a_livelock() -> None:
    async def scenario(sim: Sim) -> None:
        sim.loop.livelock_after = 500
        for _ in range(1_000_000):
            await asyncio.sleep(0)

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Livelock)
    assert "virtual time stood still for 501 turns" in _error(outcome)


def test_an_endless_scenario_exceeds_its_time_limit() -> None:
    async def scenario(sim: Sim) -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(7)

    outcome = run_one(scenario, 1, time_limit=60, check=False)
    assert isinstance(outcome.error, TimeLimit)
    assert "the next timer is past the limit of 60 s at 56.000000 s" in _error(outcome)


def test_an_exception_that_is_never_retrieved_fails_the_schedule() -> None:
    async def scenario(sim: Sim) -> None:
        async def fail() -> None:
            raise LookupError("lost")

        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    outcome = run_one(scenario, 1, check=False)
    assert isinstance(outcome.error, Unretrieved)
    assert isinstance(outcome.error.__cause__, LookupError)
    assert "Task exception was never retrieved" in _error(outcome)


def test_an_exception_in_a_callback_fails_the_schedule() -> None:
    async def scenario(sim: Sim) -> None:
        sim.loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    assert isinstance(run_one(scenario, 1, check=False).error, Unretrieved)


def test_a_pending_task_without_references_fails_the_schedule() -> None:
    async def scenario(sim: Sim) -> None:
        async def wait() -> None:
            await sim.loop.create_future()

        asyncio.create_task(wait())
        await asyncio.sleep(1)

    assert "Task was destroyed but it is pending" in _error(run_one(scenario, 1, check=False))


def test_pending_tasks_are_cancelled_at_the_end_and_may_clean_up() -> None:
    cleaned: list[float] = []

    async def scenario(sim: Sim) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)
                cleaned.append(sim.now)

        sim.kept = asyncio.create_task(work())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    outcome = run_one(scenario, 1, check=False)
    assert outcome.ok
    assert cleaned == [2.0]
    assert (outcome.seconds, outcome.abandoned) == (1.0, ())


def test_an_exception_during_the_final_cancellation_fails_the_schedule() -> None:
    async def scenario(sim: Sim) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                raise LookupError("in the clean-up")

        sim.kept = asyncio.create_task(work())  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    assert "in the clean-up" in _error(run_one(scenario, 1, check=False))


def test_a_task_that_ignores_cancellation_is_reported_as_abandoned() -> None:
    async def scenario(sim: Sim) -> None:
        async def stubborn() -> None:
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue

        sim.kept = asyncio.create_task(stubborn(), name="stubborn")  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    outcome = run_one(scenario, 1, check=False)
    assert outcome.ok
    assert outcome.abandoned == ("stubborn",)


def test_threads_processes_and_real_sockets_are_refused_with_the_reason() -> None:
    async def scenario(sim: Sim) -> None:
        with pytest.raises(Unsimulated, match="run_in_executor cannot be simulated: threads"):
            await asyncio.to_thread(print)
        with pytest.raises(Unsimulated, match="starts no processes"):
            await asyncio.create_subprocess_exec("true", stdout=subprocess.DEVNULL)
        with pytest.raises(Unsimulated, match="set_task_factory cannot be simulated: the seed"):
            sim.loop.set_task_factory(None)
        with pytest.raises(Unsimulated, match="TCP only"):
            await sim.loop.create_datagram_endpoint(asyncio.DatagramProtocol)
        with pytest.raises(Unsimulated, match="TLS uses random numbers"):
            await asyncio.open_connection("main", 1, ssl=True)
        with pytest.raises(NotImplementedError, match="no signals"):
            sim.loop.add_signal_handler(2, print)

    run_one(scenario, 1).result()


def test_call_soon_threadsafe_works_from_this_thread_only() -> None:
    async def scenario(sim: Sim) -> None:
        done = asyncio.Event()
        sim.loop.call_soon_threadsafe(done.set)
        await done.wait()
        errors: list[Exception] = []

        def call() -> None:
            try:
                sim.loop.call_soon_threadsafe(print)
            except Unsimulated as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(errors) == 1

    run_one(scenario, 1).result()


def test_global_state_is_restored_after_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    import random
    import sys

    async def scenario(sim: Sim) -> None:
        random.random()

    random.seed(5)
    expected = random.Random(5).random()
    hook = sys.unraisablehook
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    run_one(scenario, 1)
    assert random.random() == expected
    assert gc.isenabled()
    assert calls == ["freeze", "unfreeze"]
    assert sys.unraisablehook is hook


def test_asynchronous_generators_are_closed_at_the_end() -> None:
    closed: list[str] = []

    async def scenario(sim: Sim) -> None:
        async def ticks() -> Any:
            try:
                yield 1
                yield 2
            finally:
                closed.append("closed")

        sim.ticks = ticks()  # type: ignore[attr-defined]
        await anext(sim.ticks)  # type: ignore[attr-defined]

    assert run_one(scenario, 1, check=False).ok
    assert closed == ["closed"]


def test_the_reprs_of_loop_sim_and_outcome() -> None:
    async def scenario(sim: Sim) -> str:
        await asyncio.sleep(2)
        return f"{sim.loop!r} {sim!r}"

    outcome = run_one(scenario, 3, check=False)
    assert outcome.result().startswith("<SimLoop seed 3 at 2.000000 s, ")
    assert "<Sim seed 3 at 2.000000 s, <Network of 1 hosts, 0 connections, no faults>>" in (
        outcome.result()
    )
    assert repr(outcome).startswith("<Outcome of seed 3: passed after 2.000000 s, ")


def test_a_closed_loop_refuses_callbacks() -> None:
    loop = SimLoop(1)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
