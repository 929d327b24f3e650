"""Calls that block, in threads that never keep a program or a loop alive.

Not an executor: a loop waits at its end for the threads of its own, the interpreter for all of
them, and the few that there are would soon be taken by servers that do not answer. A connect to
one that has vanished can take minutes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread", "start_thread"]

T = TypeVar("T")


def in_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], object] | None = None
) -> asyncio.Future[T]:
    """Run a call in a daemon thread of its own, without blocking the loop; it can be awaited.

    `unwanted` gets a result that comes when nobody waits for it any more.
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
    """Run a call in a daemon thread of its own; threads can wait for its outcome."""
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
