"""The supervisor when several things happen at once: restarts, stops, cancellations, late words."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from itertools import pairwise

import pytest
from tests.kernel.stage import Stage, settle, virtual

from moored.kernel import (
    Backoff,
    Child,
    Context,
    RestartIntensityExceeded,
    StartFailed,
    SupervisionError,
    Supervisor,
)
from moored.testing import Sim, run_one, scaled


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


def test_an_error_handed_to_a_waiter_does_not_hurt_who_handed_it_over() -> None:
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
def test_giving_up_while_a_later_child_starts_raises_the_reason(nested: bool) -> None:
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


def test_a_restart_by_hand_that_fails_leaves_the_child_to_the_usual_rules() -> None:
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


def test_an_abandoned_child_cannot_speak_for_its_successor() -> None:
    async def scenario() -> None:
        async def run(ctx: Context) -> None:
            if ctx.generation == 2:  # stopped while it prepares, and says started() far too late
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

    for seed in range(scaled(2000, least=200)):
        run_one(scenario, seed)
