"""Races of the supervisor: concurrent restarts, stops, cancellations and late calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from itertools import pairwise
from typing import Any

import pytest
from tests.kernel.stage import Stage, settle, virtual

from moored.kernel import (
    Backoff,
    Child,
    Context,
    NotRunning,
    Registry,
    RestartIntensityExceeded,
    StartFailed,
    SupervisionError,
    Supervisor,
    patiently,
)
from moored.testing import Sim, run_one, scaled

pytestmark = pytest.mark.pure


def test_a_failure_does_not_keep_what_the_failed_code_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "moored.supervisor")  # the captured log would keep it

    class Socket:
        pass

    async def scenario() -> None:
        held: list[weakref.ref[Socket]] = []

        async def run(ctx: Context) -> None:
            socket = Socket()
            held.append(weakref.ref(socket))
            ctx.started()
            if ctx.generation == 1:
                raise ValueError("with a socket in its frame")
            await asyncio.Event().wait()

        async with Supervisor(children=[Child("a", run)]):
            await settle()
            gc.collect()
            assert [ref() is None for ref in held] == [True, False]

    virtual(scenario)


def test_an_error_raised_to_a_waiter_does_not_affect_its_source() -> None:
    async def scenario() -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        beats = 0

        async def link(ctx: Context) -> None:
            nonlocal beats
            ctx.started()
            try:
                raise ConnectionResetError("lost")
            except ConnectionError as error:
                waiter.set_exception(error)
            while True:
                await asyncio.sleep(0.1)
                beats += 1

        async def user(ctx: Context) -> None:
            ctx.started()
            await waiter

        children = [Child("user", user, restart="temporary"), Child("link", link)]
        async with Supervisor(children=children):
            await asyncio.sleep(5)
            assert beats > 40

    virtual(scenario)


def test_a_restart_of_a_child_that_is_stopped_meanwhile_starts_nothing() -> None:
    async def scenario() -> None:
        running = 0

        async def slow_to_end(ctx: Context) -> None:
            nonlocal running
            running += 1
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)
                running -= 1

        async with Supervisor(children=[Child("a", slow_to_end)]) as root:
            await asyncio.gather(
                root.stop_child("a"), root.restart_child("a"), return_exceptions=True
            )
            assert running == len(root.tree().children)
        assert running == 0

    virtual(scenario)


@pytest.mark.parametrize("nested", [False, True])
def test_a_supervisor_that_fails_while_a_later_child_starts_raises_the_reason(nested: bool) -> None:
    async def scenario() -> None:
        async def fragile(ctx: Context) -> None:
            ctx.started()
            await asyncio.sleep(0.1)
            raise ValueError("fragile broke")

        async def slow(ctx: Context) -> None:
            await asyncio.sleep(20)
            ctx.started()

        children = [Child("fragile", fragile), Child("slow", slow)]
        if nested:
            children = [Supervisor.child("inner", children=children, intensity=(1, 60.0))]
        root = Supervisor(children=children, intensity=(1, 60.0))
        with pytest.raises(StartFailed if nested else RestartIntensityExceeded, match="gave up"):
            await root.start()
        assert root.state in ("stopped", "failed")

    virtual(scenario)


def test_a_child_stopped_while_it_starts_a_sibling_is_not_abandoned() -> None:
    async def scenario() -> None:
        async def slow(ctx: Context) -> None:
            await asyncio.sleep(20)

        async def parent(ctx: Context) -> None:
            ctx.started()
            await ctx.supervisor.start_child(Child("slow", slow))

        stage = Stage()
        root = Supervisor(strategy="one_for_all", children=[stage.child("a"), Child("p", parent)])
        await root.start()
        await settle()
        await root.stop()
        assert root.abandoned == 0
        assert not [t for t in asyncio.all_tasks() if t.get_name() == "root/slow"]

    virtual(scenario)


def test_a_failed_restart_child_leaves_the_child_to_the_usual_rules() -> None:
    async def scenario() -> None:
        starts: list[float] = []

        async def run(ctx: Context) -> None:
            starts.append(ctx.clock.monotonic())
            if len(starts) in (2, 3):
                raise OSError("refused")
            ctx.started()
            await asyncio.Event().wait()

        child = Child("a", run, backoff=Backoff(10, 10))
        async with Supervisor(children=[child], intensity=None) as root:
            with pytest.raises(StartFailed):
                await root.restart_child("a")
            await asyncio.sleep(30)
            assert root.tree().children[0].state == "running"
            assert [round(b - a) for a, b in pairwise(starts)] == [0, 10, 10]

    virtual(scenario)


def test_a_call_of_an_abandoned_child_does_not_affect_its_successor() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            if ctx.generation == 2:  # stopped before started(), and calls it far too late
                for _ in range(8):
                    try:
                        await asyncio.sleep(1)
                    except asyncio.CancelledError:
                        pass
                ctx.started("stale")
                return
            await asyncio.sleep(20 if ctx.generation == 3 else 0)
            ctx.started(f"generation {ctx.generation}")
            await asyncio.Event().wait()

        async with Supervisor(children=[Child("a", run, shutdown=1)], intensity=None) as root:
            second = asyncio.create_task(root.restart_child("a"))
            await settle()
            third = asyncio.create_task(root.restart_child("a"))
            await asyncio.sleep(12)
            assert root.abandoned == 1
            assert root.value("a") is None
            assert await third == "generation 3"
            assert isinstance(
                (await asyncio.gather(second, return_exceptions=True))[0], SupervisionError
            )

    virtual(scenario)


def test_all_significant_waits_for_those_not_started_yet() -> None:
    async def scenario() -> None:
        async def brief(ctx: Context) -> None:
            ctx.started()

        async def later(ctx: Context) -> None:
            await asyncio.sleep(1)
            ctx.started()
            await asyncio.sleep(1)

        children = [
            Child("brief", brief, restart="transient", significant=True),
            Child("later", later, restart="transient", significant=True),
        ]
        async with Supervisor(children=children, auto_shutdown="all_significant") as root:
            assert root.state == "running"
            await root.wait()

        # With any_significant, the first end is a normal end, also during the start.
        async with Supervisor(children=children, auto_shutdown="any_significant") as root:
            await root.wait()
        assert root.error is None

    virtual(scenario)


def test_a_cancellation_of_the_caller_is_never_swallowed() -> None:
    async def scenario(sim: Sim) -> None:
        stage = Stage()
        root = Supervisor(children=[stage.child("a")])
        await root.start()
        calls = [root.restart_child("a"), root.stop_child("a"), root.start_child(stage.child("b"))]
        tasks = [asyncio.create_task(call) for call in calls]
        for _ in range(sim.rng.randrange(6)):
            await asyncio.sleep(0)
        stopping = asyncio.create_task(root.stop())
        cancelled = [task for task in tasks if task.cancel()]
        await asyncio.gather(*tasks, stopping, return_exceptions=True)
        for task in cancelled:
            assert task.cancelled() or not task.exception(), task

    for seed in range(scaled(2000, least=25)):
        run_one(scenario, seed)


def test_siblings_that_fail_together_are_restarted_once() -> None:
    """The second reaction finds its child in a newer generation, and does nothing."""

    async def scenario(sim: Sim) -> None:
        stage = Stage()
        names = ["a", "b", "c"]
        strategy: Any = sim.rng.choice(["one_for_all", "one_for_one"])
        children = [stage.child(name) for name in names]
        async with Supervisor(strategy=strategy, children=children, intensity=None) as root:
            failing = sim.rng.sample(names, 2)
            for name in failing:
                stage.crash(name)
            await settle()
            again = names if strategy == "one_for_all" else failing
            lives = {child.name: child.generation for child in root.tree().children}
            assert lives == {name: 2 if name in again else 1 for name in names}

    for seed in range(scaled(1000, least=12)):
        run_one(scenario, seed)


def test_a_failure_before_restart_child_restarts_nothing_after_it() -> None:
    async def scenario(sim: Sim) -> None:
        stage = Stage()
        async with Supervisor(children=[stage.child("a")], intensity=None) as root:
            stage.crash("a")
            for _ in range(sim.rng.randrange(5)):
                await asyncio.sleep(0)
            await root.restart_child("a")
            generation = root.tree().children[0].generation
            await settle()
            assert root.tree().children[0].generation == generation
            assert generation <= 3

    for seed in range(scaled(1000, least=12)):
        run_one(scenario, seed)


def test_a_failure_of_a_child_that_was_replaced_under_its_name_restarts_nothing() -> None:
    async def scenario(sim: Sim) -> None:
        stage, other = Stage(), Stage()
        async with Supervisor(children=[stage.child("a")], intensity=None) as root:
            stage.crash("a")
            for _ in range(sim.rng.randrange(5)):
                await asyncio.sleep(0)
            await root.stop_child("a")
            stage.take()
            assert await root.start_child(other.child("a")) == "a1"
            await settle()
            assert stage.take() == ""
            assert other.take() == "+a1"

    for seed in range(scaled(1000, least=12)):
        run_one(scenario, seed)


def test_an_uptime_as_long_as_the_longest_delay_resets_the_backoff() -> None:
    async def scenario() -> None:
        starts: list[float] = []
        uptimes = iter([0, 0, 0, 7.9, 8.1, 0, 0])

        async def run(ctx: Context) -> None:
            starts.append(ctx.clock.monotonic())
            ctx.started()
            await asyncio.sleep(next(uptimes, 1000))
            raise ValueError

        child = Child("a", run, backoff=Backoff(1, 8))
        async with Supervisor(children=[child], intensity=None):
            await asyncio.sleep(60)
        gaps = [b - a for a, b in pairwise(starts)]
        expected = [1, 2, 4, 7.9 + 8, 8.1 + 1, 2, 4]
        assert gaps == pytest.approx(expected, abs=0.01)

    virtual(scenario)


def test_started_during_a_stop_has_no_effect() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ctx.started("late")
                await asyncio.sleep(1)

        async with Supervisor() as root:
            starting = asyncio.create_task(root.start_child(Child("a", run)))
            await settle()
            stopping = asyncio.create_task(root.stop_child("a"))
            await asyncio.sleep(0.5)
            assert root.value("a") is None
            assert root.tree().children[0].state == "stopping"
            await stopping
            assert isinstance((await asyncio.wait([starting]))[0].pop().exception(), NotRunning)

    virtual(scenario)


def test_a_caller_of_stop_child_that_is_cancelled_does_not_wait_for_the_supervisor() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(3)

        async with Supervisor() as root:
            await root.start_child(Child("a", run))
            began = asyncio.get_running_loop().time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await root.stop_child("a")
            assert asyncio.get_running_loop().time() - began < 2
            await asyncio.sleep(3)
            assert not root.tree().children, "the stop goes on"

    virtual(scenario)


def test_healthy_counts_for_its_own_generation_and_works_without_a_backoff() -> None:
    async def scenario() -> None:
        starts: list[float] = []

        async def run(ctx: Context) -> None:
            starts.append(ctx.clock.monotonic())
            ctx.started()
            if ctx.generation > 1:
                raise ValueError
            while True:
                try:
                    await asyncio.sleep(2.5)
                    ctx.healthy()  # of a life that was abandoned long ago
                except asyncio.CancelledError:
                    pass

        async def plain(ctx: Context) -> None:
            ctx.healthy()
            ctx.started()

        child = Child("a", run, backoff=Backoff(1, 8), shutdown=1)
        async with Supervisor(children=[child], intensity=None) as root:
            await root.start_child(Child("plain", plain, restart="temporary"))
            await root.restart_child("a")
            await asyncio.sleep(20)
        assert [b - a for a, b in pairwise(starts)][1:] == pytest.approx([1, 2, 4, 8], abs=0.01)

    virtual(scenario)


def test_a_second_stop_of_a_child_does_not_affect_its_successor() -> None:
    async def scenario(sim: Sim) -> None:
        stage = Stage()

        async def slow(ctx: Context) -> None:
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(2)

        async with Supervisor(children=[Child("a", slow)]) as root:
            stops = [asyncio.create_task(root.stop_child("a")) for _ in range(3)]
            await settle()
            await asyncio.wait(stops, return_when=asyncio.FIRST_COMPLETED)
            assert await root.start_child(stage.child("a")) == "a1"
            await asyncio.wait(stops)
            assert root.value("a") == "a1"
        assert stage.take() == "+a1 -a1"

    for seed in range(scaled(1000, least=12)):
        run_one(scenario, seed)


def test_a_child_that_fails_while_stopping_is_recorded_once() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("while it stopped")

        async with Supervisor(children=[Child("a", run)]) as root:
            await root.stop_child("a")
            await settle()
            texts = [event.text for event in root.recorder.events("root/a")]
            assert texts == ["running", "failed while stopping"]

    virtual(scenario)


def test_a_second_stop_of_a_child_does_not_give_it_more_time() -> None:
    async def scenario() -> None:
        async def stubborn(ctx: Context) -> None:
            ctx.started()
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    if root.abandoned:
                        raise

        async with Supervisor(children=[Child("a", stubborn, shutdown=3)]) as root:
            before = root.clock.monotonic()
            first = asyncio.create_task(root.stop_child("a"))
            await asyncio.sleep(2)
            await root.stop()
            assert root.clock.monotonic() - before == pytest.approx(3, abs=0.01)
            assert root.abandoned == 1
            await first

    virtual(scenario)


def test_a_supervisor_starts_once() -> None:
    async def scenario() -> None:
        stage = Stage()
        root = Supervisor(children=[stage.child("a")])
        await root.start()
        with pytest.raises(NotRunning, match="root is running: make a new Supervisor"):
            await root.start()
        assert root.value("a") == "a1"
        await root.stop()
        with pytest.raises(NotRunning, match="root is stopped: make a new Supervisor"):
            await root.start()
        assert root.state == "stopped"

    virtual(scenario)


def test_patiently_raises_the_cancellation_when_the_task_has_ended() -> None:
    async def scenario() -> None:
        work = asyncio.create_task(asyncio.sleep(10))
        waiting = asyncio.create_task(patiently(work))
        for _ in range(2):
            await settle()
            waiting.cancel()
        await asyncio.wait([waiting])
        assert work.done()
        assert not work.cancelled()
        assert waiting.cancelled()

    virtual(scenario)


def test_the_error_of_a_block_has_a_note_only_if_its_supervisor_failed_too() -> None:
    async def scenario() -> None:
        quiet = ValueError("of the block")
        with pytest.raises(ValueError, match="of the block"):
            async with Supervisor():
                raise quiet
        assert not hasattr(quiet, "__notes__")

        async def crash(error: Exception | None) -> None:
            stage = Stage()
            async with Supervisor(children=[stage.child("a")], intensity=(0, 1)) as root:
                stage.crash("a")
                await settle()
                if error is not None:
                    raise error
                await root.wait()

        with pytest.raises(RestartIntensityExceeded) as caught:
            await crash(None)
        assert not hasattr(caught.value, "__notes__")
        loud = ValueError("of the block")
        with pytest.raises(ValueError, match="of the block"):
            await crash(loud)
        assert "meanwhile root failed: root gave up" in loud.__notes__[0]

    virtual(scenario)


def test_an_abandoned_child_cannot_be_an_owner() -> None:
    async def scenario() -> None:
        registry: Registry[str, int] = Registry()
        refusals: list[str] = []

        async def run(ctx: Context) -> None:
            ctx.started()
            for _ in range(3):
                try:
                    await asyncio.sleep(2)
                except asyncio.CancelledError:
                    pass
            try:
                ctx.register(registry, "name", 1)
            except RuntimeError as refusal:
                refusals.append(str(refusal))

        async with Supervisor(children=[Child("a", run, shutdown=1)]) as root:
            await root.stop_child("a")
            assert root.abandoned == 1
            await asyncio.sleep(20)
        assert ["was abandoned, so it cannot be an owner" in each for each in refusals] == [True]
        assert "name" not in registry

    virtual(scenario)


def test_restart_child_does_not_interrupt_the_restart_of_a_group() -> None:
    async def scenario() -> None:
        stage = Stage()
        children = [stage.child("a", backoff=Backoff(5, 5)), stage.child("b")]
        async with Supervisor(strategy="one_for_all", children=children) as root:
            stage.crash("a")
            await settle()
            await root.restart_child("a")
            assert root.value("b") == "b2"

    virtual(scenario)


def test_no_child_is_added_before_the_start_or_after_the_stop() -> None:
    async def scenario() -> None:
        stage = Stage()
        root = Supervisor()
        with pytest.raises(NotRunning, match=r"root is new: .* call start\(\) first"):
            await root.start_child(stage.child("a"))
        await root.start()
        await root.stop()
        with pytest.raises(NotRunning, match="root is stopped: cannot start 'a'"):
            await root.start_child(stage.child("a"))
        assert stage.take() == ""

    virtual(scenario)


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
@pytest.mark.parametrize("how", ["stop the supervisor", "stop the child", "restart the group"])
def test_a_child_that_stops_a_sibling_while_it_is_stopped_is_not_abandoned(
    strategy: Any, how: str
) -> None:
    async def scenario() -> None:
        stage = Stage()
        ends = []

        async def run(ctx: Context) -> None:
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                await ctx.supervisor.stop_child("helper")
                ends.append(ctx.generation)

        helper, other = stage.child("helper"), stage.child("other")
        children = [other, helper, Child("worker", run)]
        async with Supervisor(strategy=strategy, children=children) as root:
            match how:
                case "stop the child":
                    await root.stop_child("worker")
                    await settle()
                    assert [child.name for child in root.tree().children] == ["other"]
                case "restart the group":
                    stage.crash("other")
                    await settle()
                    alone = ["helper"] if strategy == "one_for_one" else []
                    names = [child.name for child in root.tree().children]
                    assert names == ["other", *alone, "worker"]
            before = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() == pytest.approx(before, abs=0.1)
        assert root.abandoned == 0
        assert ends[0] == 1

    virtual(scenario)
