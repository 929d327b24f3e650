"""Tasks and futures whose hash does not depend on where they lie in memory.

asyncio keeps tasks in sets (a TaskGroup cancels its children in the order of one), and an object's
usual hash is its address, which differs from run to run. Numbering them makes those orders a
matter of the seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._hosts import Process

__all__ = ["SimFuture", "SimTask"]


class SimFuture(asyncio.Future[Any]):
    """A future with a number."""

    serial = 0

    def __hash__(self) -> int:
        return self.serial


class SimTask(asyncio.Task[Any]):
    """A task with a number, the process it belongs to, and how slow this seed makes it."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        serial: int,
        hold: float,
        process: Process | None,
        **options: Any,
    ) -> None:
        # Before the rest: asyncio puts the new task into a set, which asks for the hash.
        self.serial = serial
        self.hold = hold
        self.process = process
        self.late_until = 0.0
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.serial
