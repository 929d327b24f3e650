"""Background tasks: their first step comes after the call that starts them; they end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterator
from contextvars import Context
from inspect import isawaitable
from typing import Any, TypeVar, overload

__all__ = ["Tasks", "awaited", "is_cancelled", "outliving", "raise_if_cancelled", "start_task"]

T = TypeVar("T")


def start_task(
    work: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
) -> asyncio.Task[T]:
    """Run a coroutine as a task whose first step comes after this call.

    `asyncio.eager_task_factory` (Python 3.12) runs the first step inside `create_task`, before the
    caller has stored the task. A task that is cancelled before its first step never runs.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not None:
        work = _in_the_next_turn(work)
    return loop.create_task(work, name=name, context=context)


async def _in_the_next_turn(work: Coroutine[Any, Any, T]) -> T:
    try:
        await asyncio.sleep(0)
    except BaseException:
        work.close()
        raise
    return await work


@overload
async def awaited(value: Awaitable[T]) -> T: ...
@overload
async def awaited(value: T) -> T: ...
async def awaited(value: Any) -> Any:
    """Return the result of a plain or an async function: `await awaited(function(…))`."""
    return await value if isawaitable(value) else value


async def outliving(work: asyncio.Future[T]) -> T:
    """Return the result of work that continues if its waiter is cancelled.

    For work whose error somebody else retrieves: since Python 3.14, `asyncio.shield` passes an
    error that comes after the cancellation to the loop's exception handler.
    """
    await asyncio.wait((work,))
    return work.result()


def is_cancelled() -> bool:
    """Whether the running task itself was cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_cancelled(error: BaseException) -> None:
    """Raise `CancelledError`, with this error as its cause, if the running task was cancelled.

    A loop that continues after errors of psycopg calls this first: when a cancelled statement fails
    meanwhile, psycopg raises its error in place of the cancellation, and the loop would never end.
    """
    if is_cancelled():
        raise asyncio.CancelledError from error


class Tasks:
    """A set of background tasks, kept until they end: an event loop references them only weakly.

    An exception of a task that is not awaited goes to the loop's exception handler.
    """

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        # A dict keeps the order in which the tasks were started.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this set; its first step comes after this call."""
        task = start_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def drain(self) -> None:
        """Wait until every task has ended, including those that are started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        await self.drain()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        names = ", ".join(task.get_name() for task in self._tasks)
        return f"<Tasks: {len(self._tasks)} running{names and ': '}{names}>"
