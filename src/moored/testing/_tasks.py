"""Tasks and futures whose hash is a serial number instead of their address.

asyncio keeps tasks in sets (a TaskGroup cancels its children in the order of a set), and the
default hash of an object is its address, which differs from run to run. With serial numbers the
order of such a set depends on the seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._hosts import Process

__all__ = ["SimFuture", "SimTask"]


class SimFuture(asyncio.Future[Any]):
    """A future with a serial number."""

    serial = 0

    def __hash__(self) -> int:
        return self.serial


class SimTask(asyncio.Task[Any]):
    """A task with its serial number, its process, and the probability that a turn skips it."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        serial: int,
        hold: float,
        process: Process | None,
        **options: Any,
    ) -> None:
        # Before super().__init__(), which puts the task into a set and so needs its hash.
        self.serial = serial
        self.hold = hold
        self.process = process
        self.late_until = 0.0
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.serial
