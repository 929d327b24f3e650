"""Calls that block, in threads that never keep a program or a loop alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Run a call in a daemon thread of its own; returns the future of its outcome.

    Not an executor: a loop waits at its end for the threads of its own, the interpreter for all of
    them, and the few that there are would soon be taken by servers that do not answer.
    """
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
