"""Blocking calls in daemon threads, which never delay the end of a program or an event loop.

An executor will not do: the event loop and the interpreter wait for its threads when they end, and
a few servers that do not respond would occupy all of them. A connect to a server that has vanished
can take minutes.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ._tasks import awaited

__all__ = ["in_thread", "run_callback", "start_thread"]

T = TypeVar("T")


def in_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], object] | None = None
) -> asyncio.Future[T]:
    """Run a call in a daemon thread of its own; returns a future to await.

    `unwanted` is called with a result that arrives after the future was cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Future[T]) -> None:
        if future.cancelled():
            dispose(outcome)
        elif (error := outcome.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    def dispose(outcome: Future[T]) -> None:
        if unwanted is not None and outcome.exception() is None:
            unwanted(outcome.result())

    def report(outcome: Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            dispose(outcome)  # the loop is closed, so the future has no waiter

    try:
        start_thread(call, name=name).add_done_callback(report)
    except RuntimeError as error:  # the limit of threads is reached
        future.set_exception(error)
    return future


def start_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Run a call in a daemon thread of its own; returns a future that threads can wait for.

    The future cannot be cancelled: a thread cannot be interrupted.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except StopIteration as failure:
            # A coroutine cannot raise StopIteration.
            error = RuntimeError("the call raised StopIteration")
            error.__cause__ = failure
            future.set_exception(error)
        except BaseException as failure:
            future.set_exception(failure)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def run_callback(
    callback: Callable[..., Any],
    *args: Any,
    name: str = "moored-callback",
    unwanted: Callable[[Any], object] | None = None,
) -> Any:
    """Run a user's callback, async or plain, without blocking the loop; return its result.

    A plain callback runs in a daemon thread of its own. If the caller is cancelled, that thread
    continues, and `unwanted` is called with its result.
    """
    if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(
        getattr(callback, "__call__", None)  # noqa: B004 (an object with an async call)
    ):
        return await callback(*args)

    def dispose(result: Any) -> None:
        if inspect.iscoroutine(result):
            result.close()
        elif unwanted is not None:
            unwanted(result)

    future = in_thread(partial(callback, *args), name=name, unwanted=dispose)
    try:
        result = await future
    except asyncio.CancelledError:
        # The result may have arrived in the same iteration of the loop as the cancellation.
        if not future.cancelled() and future.exception() is None:
            dispose(future.result())
        raise
    return await awaited(result)
