"""The state of one key of `KeyedWorkers` while it has work, and their statistics."""

from __future__ import annotations

from asyncio import Future, Task
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["KeyedStatistics", "Pump", "fail"]

ItemT = TypeVar("ItemT")
R = TypeVar("R")


class KeyedStatistics(NamedTuple):
    """The current items of `KeyedWorkers`, and the outcomes of all items submitted so far."""

    #: Keys that have work.
    keys: int
    #: Items that wait behind the running one of their key.
    queued: int
    #: Items accepted so far.
    submitted: int
    #: Items refused because the queue of their key was full.
    rejected: int
    #: Items whose handler returned.
    completed: int
    #: Items whose handler raised.
    failed: int
    #: Items not started because the item before them failed.
    crashed: int
    #: Items ended by `cancel()`, or by the end of the loop.
    cancelled: int
    #: Items not started because their caller had cancelled them.
    skipped: int


@dataclass(slots=True, eq=False)
class Pump(Generic[ItemT, R]):
    """The work of one key."""

    #: The future of the item that the pump was made for.
    first: Future[R]
    #: Whether the task has made its first step; from then on it is always in a handler.
    started: bool = False
    #: Whether `cancel()` has cancelled the task, and the task has not yet noticed.
    cancelling: bool = False
    # Most keys have one item at a time: the queue is made for the second.
    queue: deque[tuple[ItemT, Future[R]]] | None = None
    task: Task[None] = field(init=False)

    def take_waiting(self) -> list[Future[R]]:
        """Remove the items that have not been started, and return their futures."""
        futures = [future for _, future in self.queue or ()]
        if self.queue:
            self.queue.clear()
        if not self.started and not self.first.done():
            futures.insert(0, self.first)
        return futures


def fail(future: Future[Any], error: BaseException) -> None:
    """Set the error, unless the caller has cancelled the future."""
    if not future.done():
        future.set_exception(error)
        # Mark the error as retrieved: the caller need not await the future.
        future.exception()
