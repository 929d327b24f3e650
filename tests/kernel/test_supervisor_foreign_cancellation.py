"""A child that was cancelled by other code than its supervisor is restarted.

The other code is a driver that cancels the future that the child awaits, or code that cancels the
child's task. Only the end of the loop, which cancels every task, ends a child permanently.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moored.kernel import Child, Context, LoopThread, Supervisor
from moored.testing import Sim, simulate

pytestmark = pytest.mark.pure

LIMIT = 30.0


class Starts:
    """A child that awaits a driver's future, and the tasks and futures of its starts."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.futures: list[asyncio.Future[None]] = []
        self.changed = asyncio.Event()

    def child(self, name: str = "link") -> Child:
        return Child(name, self._run)

    async def _run(self, ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        self.futures.append(asyncio.get_running_loop().create_future())
        ctx.started(len(self.tasks))
        self.changed.set()
        await self.futures[-1]

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self.tasks) < count:
                self.changed.clear()
                await self.changed.wait()


def cancel_the_future(starts: Starts) -> None:
    starts.futures[-1].cancel()


def cancel_the_task(starts: Starts) -> None:
    starts.tasks[-1].cancel()


CANCEL = pytest.mark.parametrize("cancel", [cancel_the_future, cancel_the_task])
Cancel = Callable[[Starts], None]


@CANCEL
@pytest.mark.every_loop
async def test_a_cancelled_child_is_restarted_when_the_task_that_made_the_supervisor_has_ended(
    cancel: Cancel,
) -> None:
    starts = Starts()

    async def set_up() -> Supervisor:
        root = Supervisor("root", children=[starts.child()])
        await root.start()
        return root

    root = await asyncio.create_task(set_up())
    cancel(starts)
    await starts.wait_for(2)
    assert root.value("link") == 2
    [child] = root.tree().children
    assert child.last_failure is not None
    assert "root/link was cancelled, and not by its supervisor" in child.last_failure
    await root.stop()


@CANCEL
def test_a_cancelled_child_is_restarted_when_its_supervisor_was_made_without_a_loop(
    cancel: Cancel,
) -> None:
    starts: list[Starts] = []

    def child(ctx: Context) -> Coroutine[Any, Any, None]:
        return starts[0]._run(ctx)

    root = Supervisor("root", children=[Child("link", child)])

    async def main() -> None:
        starts.append(Starts())
        async with root:
            cancel(starts[0])
            await starts[0].wait_for(2)

    asyncio.run(main())


@CANCEL
def test_a_cancelled_child_is_restarted_on_a_loop_thread(cancel: Cancel) -> None:
    async def set_up() -> tuple[Supervisor, Starts]:
        starts = Starts()
        root = Supervisor("root", children=[starts.child()])
        await root.start()
        return root, starts

    with LoopThread("strangers") as loop:
        root, starts = loop.run(set_up())

        async def disturb() -> None:
            cancel(starts)

        loop.run(disturb())
        loop.run(starts.wait_for(2), timeout=LIMIT)
        loop.run(root.stop())


@CANCEL
def test_a_cancelled_child_is_restarted_when_no_other_task_runs(cancel: Cancel) -> None:
    """The supervised child is the only task of the loop: its cancellation is not the loop's end."""
    loop = asyncio.new_event_loop()
    root: list[Supervisor] = []
    starts: list[Starts] = []
    over = threading.Timer(LIMIT, lambda: loop.call_soon_threadsafe(loop.stop))

    async def set_up() -> None:
        starts.append(Starts())
        root.append(Supervisor("root", children=[starts[0].child()]))
        await root[0].start()

    def look() -> None:
        if len(starts[0].tasks) > 1:
            loop.stop()
        else:
            loop.call_later(0.01, look)

    loop.run_until_complete(set_up())
    over.start()
    loop.call_soon(cancel, starts[0])
    loop.call_soon(look)
    loop.run_forever()
    over.cancel()
    assert len(starts[0].tasks) == 2
    loop.run_until_complete(root[0].stop())
    loop.close()


def test_a_child_whose_driver_cancelled_a_future_is_restarted_at_once() -> None:
    """Its task was not cancelled, so the loop is not ending."""

    async def scenario(sim: Sim) -> None:
        starts = Starts()
        async with Supervisor("root", children=[starts.child()]):
            cancel_the_future(starts)
            await asyncio.sleep(0.1)
            assert len(starts.tasks) == 2

    simulate(scenario, 5)


def test_a_child_cancelled_while_it_starts_is_a_failed_start() -> None:
    async def scenario(sim: Sim) -> None:
        async def starting(ctx: Context) -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(1, task.cancel)
            await asyncio.Event().wait()

        root = Supervisor("root", children=[Child("link", starting)])
        with pytest.raises(Exception, match="was cancelled, and not by its supervisor"):
            await root.start()

    simulate(scenario, 5)


def test_a_child_that_waits_to_be_restarted_can_be_stopped_or_restarted_by_its_user() -> None:
    async def scenario(sim: Sim) -> None:
        starts = Starts()
        async with Supervisor("root", children=[starts.child("a"), starts.child("b")]) as root:
            for task in list(starts.tasks):
                task.cancel()
            await asyncio.sleep(0.1)
            assert [child.state for child in root.tree().children] == ["waiting", "waiting"]
            assert root.value("a") is None
            await root.stop_child("a")
            assert await root.restart_child("b") == 3
            await asyncio.sleep(60)
            assert len(starts.tasks) == 3
            assert [child.name for child in root.tree().children] == ["b"]

    simulate(scenario, 20)


async def _work(ctx: Context) -> None:
    ctx.started()
    await asyncio.Event().wait()


async def _tidy_slowly() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(1.5)


async def _leave_it_running() -> None:
    root = Supervisor("root", children=[Child("a", _work), Child("b", _work)])
    await root.start()
    await root.start_child(Supervisor.child("nested", children=[Child("c", _work)]))
    await asyncio.sleep(0)


def test_the_end_of_the_loop_restarts_nothing_however_long_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        tidying = asyncio.create_task(_tidy_slowly())
        await asyncio.create_task(_leave_it_running())
        assert not tidying.done()
        raise ValueError("the error that matters")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="that matters"):
        asyncio.run(main())
    assert caplog.messages == []


def test_a_task_that_cancels_all_others_ends_children_like_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Many programs react to SIGTERM in this way."""

    async def shut_down() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(_leave_it_running())
    with caplog.at_level(logging.WARNING):
        slow = loop.create_task(_tidy_slowly())
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(shut_down())
        loop.close()
    assert slow.cancelled()
    assert caplog.messages == []
