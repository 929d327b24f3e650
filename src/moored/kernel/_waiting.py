"""Waiting for several awaitables, and for tasks that must not be cancelled or left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["all_of", "cut_socket", "first_of", "patiently", "uncancelled"]

T = TypeVar("T")


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first awaitable, then cancel and await the others; raise its error."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Of several errors at once, one is raised, and all are marked as retrieved.
        for failed in [task for task in done if task.cancelled() or task.exception()]:
            failed.result()
    finally:
        await _end(tasks)


async def all_of(*awaitables: Awaitable[T]) -> list[T]:
    """Return the results of all awaitables; if one fails, cancel the others and raise its error."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    if left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        for task in left:
            task.cancelled() or task.exception()  # one that fails on its cancellation
    # The traceback of an error that is raised now must not keep the tasks and their results alive.
    tasks.clear()


async def patiently(
    task: asyncio.Future[Any], on_cancel: Callable[[], object] = lambda: None
) -> None:
    """Wait until a task has ended, also if the waiter is cancelled; then raise the cancellation.

    `on_cancel` is called at each cancellation, to make the task end sooner. The outcome of the task
    is not raised here: the caller reads it from the task.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled


async def uncancelled(
    work: Coroutine[Any, Any, T], cut: Callable[[], object], timeout: float | None = None
) -> T:
    """Await work on a connection; on a timeout or a cancellation, cut the connection instead.

    A cancelled database driver asks the server to cancel the statement, and waits for the answer:
    for seconds, if the server does not respond.

    :param cut: closes the connection, so that the work fails at once.
    :raises TimeoutError: the work did not end within `timeout` seconds.
    """
    task = asyncio.ensure_future(work)
    # Mark an error after the cut as retrieved: the caller gets the timeout or the cancellation.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        ended, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        if not task.done():
            cut()
            await asyncio.wait({task})
    if not ended:
        raise TimeoutError(f"the server did not answer within {timeout:g} s")
    return task.result()


def cut_socket(descriptor: int) -> None:
    """Shut a socket down in both directions, which wakes the code that waits on it.

    The descriptor stays open: its owner closes it.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
        line.shutdown(socket.SHUT_RDWR)
