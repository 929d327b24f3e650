"""Waiting for what must come to its end."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["patiently"]


async def patiently(task: asyncio.Task[Any]) -> None:
    """Wait for a task to its end, however often the waiting is cancelled; then be cancelled.

    What became of the task is for the caller to ask.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
