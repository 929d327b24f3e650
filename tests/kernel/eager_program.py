"""Checks of the kernel under eager tasks, run by every interpreter that has them.

A program without pytest, because it runs on interpreters for which nothing else is installed. It
prints the names of what passed; an assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from moored.kernel import (
    Backoff,
    Child,
    Context,
    KeyedWorkers,
    LoopThread,
    NotRunning,
    Registry,
    SingleFlight,
    StartFailed,
    StatusMonitor,
    Supervisor,
    WorkCancelled,
    WorkerCrashed,
    start_task,
)

LIMIT = 30.0


class Stage:
    """Children that record their starts and ends, and fail on command."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self.orders: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()

    def note(self, what: str) -> None:
        self.trace.append(what)
        self._changed.set()

    def child(self, name: str, **options: Any) -> Child:
        async def run(ctx: Context) -> None:
            self.note(f"+{name}{ctx.generation}")
            self.orders[name] = asyncio.get_running_loop().create_future()
            ctx.started(ctx.generation)
            try:
                await self.orders[name]
            except asyncio.CancelledError:
                self.note(f"-{name}{ctx.generation}")
                raise

        return Child(name, run, **options)

    async def wait_for(self, what: str) -> None:
        while what not in self.trace:
            self._changed.clear()
            await self._changed.wait()


async def children_start_in_order_and_stop_in_reverse() -> None:
    stage = Stage()
    async with Supervisor(children=[stage.child("a"), stage.child("b")]) as root:
        assert (root.value("a"), root.value("b")) == (1, 1)
        assert await root.start_child(stage.child("c")) == 1
        await root.stop_child("b")
        assert await root.restart_child("a") == 2
    assert stage.trace == ["+a1", "+b1", "+c1", "-b1", "-a1", "+a2", "-c1", "-a2"]
    assert root.state == "stopped"


async def a_failed_child_is_restarted_with_its_siblings() -> None:
    stage = Stage()
    children = [stage.child("a"), stage.child("b"), stage.child("c")]
    async with Supervisor(strategy="rest_for_one", children=children):
        stage.orders["b"].set_exception(ValueError("told to"))
        await stage.wait_for("+c2")
    assert stage.trace == ["+a1", "+b1", "+c1", "-c1", "+b2", "+c2", "-c2", "-b2", "-a1"]


async def a_child_that_ends_in_its_first_step_has_started() -> None:
    async def short(ctx: Context) -> None:
        ctx.started("value")

    async def mute(ctx: Context) -> None:
        pass

    async with Supervisor() as root:
        assert await root.start_child(Child("short", short, restart="transient")) == "value"
        assert await root.start_child(Child("mute", mute, restart="temporary")) is None


async def a_child_that_fails_in_its_first_step_fails_its_start() -> None:
    async def broken(ctx: Context) -> None:
        raise LookupError("no such thing")

    async with Supervisor() as root:
        starting = asyncio.create_task(root.start_child(Child("broken", broken)))
        await asyncio.wait([starting])
        failure = starting.exception()
        assert isinstance(failure, StartFailed)
        assert "no such thing" in str(failure)
        assert root.tree().children == ()


async def a_child_that_fails_at_once_is_restarted_after_its_backoff() -> None:
    starts = asyncio.Semaphore(0)

    async def broken(ctx: Context) -> None:
        ctx.started()
        starts.release()
        raise ValueError("at once")

    children = [Child("broken", broken, backoff=Backoff(0.01, 0.01))]
    async with Supervisor(children=children, intensity=None):
        for _ in range(3):
            await starts.acquire()


async def a_name_is_free_before_the_next_start() -> None:
    registry: Registry[str, int] = Registry()
    stage = Stage()

    async def named(ctx: Context) -> None:
        ctx.register(registry, "name", ctx.generation)
        ctx.started()
        stage.note(f"+{ctx.generation}")
        if ctx.generation < 3:
            raise ValueError("again")
        await asyncio.Event().wait()

    async with Supervisor(children=[Child("named", named)]):
        await stage.wait_for("+3")
        assert registry.whereis("name") == 3
    assert registry.whereis("name") is None


async def a_child_may_start_a_sibling_and_stop_its_supervisor_in_its_first_step() -> None:
    stage = Stage()

    async def busy(ctx: Context) -> None:
        await ctx.supervisor.start_child(stage.child("b"))
        ctx.started()
        await ctx.supervisor.stop()

    root = Supervisor()
    await root.start()
    with suppress(NotRunning):  # it may stop the supervisor before this call returns
        await root.start_child(Child("busy", busy, restart="temporary"))
    await root.wait()
    assert stage.trace == ["+b1", "-b1"]


async def a_nested_supervisor_that_gives_up_is_restarted() -> None:
    stage = Stage()
    inner = Supervisor.child("inner", children=[stage.child("x")], intensity=(0, 1.0))
    async with Supervisor(children=[inner]):
        stage.orders["x"].set_exception(ValueError("told to"))
        stage.trace.clear()
        await stage.wait_for("+x1")
    assert stage.trace == ["+x1", "-x1"]


async def a_child_that_a_stranger_cancels_is_restarted() -> None:
    stage = Stage()
    async with Supervisor(children=[stage.child("a")]):
        stage.orders["a"].cancel()
        await stage.wait_for("+a2")


async def one_flight_for_many_callers() -> None:
    flights, calls = SingleFlight(), 0

    async def attempt() -> int:
        nonlocal calls
        calls += 1
        return calls

    async def slow() -> int:
        await asyncio.sleep(0)
        return await attempt()

    assert await flights.do("key", attempt) == 1
    assert set(await asyncio.gather(*(flights.do("key", slow) for _ in range(5)))) == {2}
    assert len(flights) == 0


async def keyed_work_is_done_in_order() -> None:
    done: list[tuple[str, int]] = []

    async def handle(key: str, item: int) -> int:
        if item % 2:
            await asyncio.sleep(0)
        if item == 7:
            raise ValueError("seven")
        if item == 8:
            await asyncio.Event().wait()
        done.append((key, item))
        return item

    async with KeyedWorkers(handle) as workers:
        futures = [workers.submit(key, item) for item in range(6) for key in "ab"]
        assert done == [], "nothing runs inside submit()"
        assert await asyncio.gather(*futures) == [item for item in range(6) for _ in "ab"]
        assert [item for key, item in done if key == "a"] == list(range(6))
        crash = (workers.submit("c", 7), workers.submit("c", 0))
        outcomes = await asyncio.gather(*crash, return_exceptions=True)
        assert [type(each) for each in outcomes] == [ValueError, WorkerCrashed]
        never = workers.submit("d", 8)
        assert workers.cancel("d") == 1
        stuck = workers.submit("e", 8)
        await asyncio.sleep(0.01)
        assert workers.cancel() == 1
        cancelled = await asyncio.gather(never, stuck, return_exceptions=True)
        assert [type(each) for each in cancelled] == [WorkCancelled, WorkCancelled]
    assert len(workers) == 0


async def a_condition_ends_with_its_owner() -> None:
    monitor = StatusMonitor(["up"], lambda conditions: conditions["up"].met)

    async def owner() -> None:
        monitor.set("up")

    await start_task(owner(), name="owner")
    assert await monitor.wait_until(lambda up: not up, timeout=LIMIT) is False


async def a_task_of_the_kernel_never_begins_inside_the_call_that_starts_it() -> None:
    begun: list[int] = []

    async def work() -> int:
        begun.append(1)
        return 5

    task = start_task(work(), name="work")
    assert begun == []
    assert await task == 5
    task = start_task(work(), name="cancelled")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert begun == [1]


SCENARIOS: list[Callable[[], Coroutine[Any, Any, None]]] = [
    children_start_in_order_and_stop_in_reverse,
    a_failed_child_is_restarted_with_its_siblings,
    a_child_that_ends_in_its_first_step_has_started,
    a_child_that_fails_in_its_first_step_fails_its_start,
    a_child_that_fails_at_once_is_restarted_after_its_backoff,
    a_name_is_free_before_the_next_start,
    a_child_may_start_a_sibling_and_stop_its_supervisor_in_its_first_step,
    a_nested_supervisor_that_gives_up_is_restarted,
    a_child_that_a_stranger_cancels_is_restarted,
    one_flight_for_many_callers,
    keyed_work_is_done_in_order,
    a_condition_ends_with_its_owner,
    a_task_of_the_kernel_never_begins_inside_the_call_that_starts_it,
]


async def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", None))
    async with asyncio.timeout(LIMIT):
        await scenario()
    left = asyncio.all_tasks() - before
    assert not left, left
    print(scenario.__name__)  # noqa: T201 (a program says what it did)


def main() -> None:
    for scenario in SCENARIOS:
        asyncio.run(play(scenario))
    with LoopThread("eager") as loop:
        loop.run(play(children_start_in_order_and_stop_in_reverse), timeout=LIMIT)


if __name__ == "__main__":
    main()
