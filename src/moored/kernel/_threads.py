"""Blocking calls, in threads that never keep a program or a loop alive.

Not an executor: a loop waits at its end for the threads of its own, the interpreter for all of
them, and the few that there are would soon be taken by servers that do not answer. A connect to
one that has vanished can take minutes.
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
    """Run a call in a daemon thread of its own, without blocking the loop; it can be awaited.

    `unwanted` gets a result that arrives after its waiter was cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Future[T]) -> None:
        if future.cancelled():
            clear_away(outcome)
        elif (error := outcome.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    def clear_away(outcome: Future[T]) -> None:
        if unwanted is not None and outcome.exception() is None:
            unwanted(outcome.result())

    def tell(outcome: Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:
            # The loop has ended, and with it everybody who wanted to know.
            clear_away(outcome)

    start_thread(call, name=name).add_done_callback(tell)
    return future


def start_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Run a call in a daemon thread of its own; returns a future that threads can wait for."""
    future: Future[T] = Future()
    # From here on it cannot be cancelled: who does not want it any more just leaves.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except StopIteration as failure:
            # It means something else where somebody awaits, so it cannot be raised there.
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

    A plain callback runs in a daemon thread of its own. When the caller is cancelled, that thread
    goes on, and `unwanted` gets its result.
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
        # The result may have arrived in the turn of the loop in which the caller was cancelled.
        if not future.cancelled() and future.exception() is None:
            dispose(future.result())
        raise
    return await awaited(result)
