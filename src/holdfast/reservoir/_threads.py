"""Calls that block, in threads that never keep a program alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], object] | None = None
) -> asyncio.Future[T]:
    """Run a call in a daemon thread of its own; returns the future of its outcome.

    `unwanted` gets a result that comes when nobody waits for it any more.

    Not an executor: the interpreter waits at its end for the threads of those, and a connect to a
    server that has vanished can take minutes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            if error is None and unwanted is not None:
                unwanted(result)  # type: ignore[arg-type]
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except StopIteration as failure:
            # It means something else where somebody awaits, so it cannot be raised there.
            error = RuntimeError("the call raised StopIteration")
            error.__cause__ = failure
        except BaseException as failure:
            error = failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            # The loop has ended, and with it everybody who wanted to know.
            if error is None and unwanted is not None:
                unwanted(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
