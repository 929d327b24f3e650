"""Waiting for a task that must not be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["patiently"]


async def patiently(
    task: asyncio.Future[Any], on_cancel: Callable[[], object] = lambda: None
) -> None:
    """Wait until a task has ended, also when the waiter is cancelled; then raise the cancellation.

    `on_cancel` is called at each cancellation, to hurry the task. The outcome of the task is not
    raised here: the caller reads it from the task.
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
