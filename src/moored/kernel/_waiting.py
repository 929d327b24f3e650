"""Waiting for several awaitables, and for work that must not be cancelled."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["all_of", "cut_socket", "first_of", "uncancelled"]

T = TypeVar("T")


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first of these, then cancel and await the others; raise what it raised."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(tasks)


async def all_of(*awaitables: Awaitable[T]) -> list[T]:
    """Wait for all of these; the first one that fails cancels the others, and is raised."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    if left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left)
    # The traceback of an error that is raised now must not keep the tasks, and all that they hold.
    tasks.clear()


async def uncancelled(
    work: Coroutine[Any, Any, T], cut: Callable[[], object], timeout: float | None = None
) -> T:
    """Await work on a connection; a caller that gives up cuts the connection instead.

    A database driver whose statement is cancelled asks the server to cancel it, and waits for the
    answer: for seconds, if the server is silent.

    :param cut: ends the connection, so that the work fails at once.
    :raises TimeoutError: the work did not end within `timeout` seconds.
    """
    task = asyncio.ensure_future(work)
    # Mark an error after the cut as retrieved: the caller has its own.
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
    """Shut a socket down both ways, which wakes the code that waits on it; it stays open."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
        line.shutdown(socket.SHUT_RDWR)
