"""Clean-ups that run when a task ends: they free its names and conditions.

For an ordinary task the clean-ups run when asyncio reports its end. For a supervised child that
would be too late: its supervisor may start the next one in the same iteration of the loop. So the
clean-ups of a supervised child run inside its task, as its last step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

log = logging.getLogger("moored.kernel")

__all__ = ["CleanUp", "Owned", "Reason", "adopt", "current_owner", "reason_of", "when_ended"]

#: Why a task ended: it returned, it was stopped on purpose, or it raised this exception.
Reason = Literal["normal", "shutdown"] | BaseException
CleanUp = Callable[[Reason], None]


class Owned:
    """The clean-ups of one task, run once, the newest first."""

    __slots__ = ("_clean_ups", "released")

    def __init__(self) -> None:
        self._clean_ups: dict[CleanUp, None] = {}
        # Without the reason: its traceback may refer to the task, which `_owned` would keep alive.
        self.released = False

    def add(self, clean_up: CleanUp) -> None:
        """Add a clean-up, to run when the task ends."""
        self._clean_ups[clean_up] = None

    def remove(self, clean_up: CleanUp) -> None:
        """Remove a clean-up."""
        self._clean_ups.pop(clean_up, None)

    def release(self, reason: Reason) -> None:
        """Run every clean-up, once."""
        if not self.released:
            self.released = True
            while self._clean_ups:
                clean_up, _ = self._clean_ups.popitem()
                try:
                    clean_up(reason)
                except Exception:  # the others must still be run
                    log.exception("a clean-up failed: %r", clean_up)


_owned: WeakKeyDictionary[asyncio.Task[Any], Owned] = WeakKeyDictionary()


def adopt(task: asyncio.Task[Any]) -> Owned:
    """Return the clean-ups of a supervised task, which its supervisor runs instead of asyncio."""
    owned = _owned[task] = Owned()
    return owned


def current_owner() -> asyncio.Task[Any]:
    """Return the running task, the default owner."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError(
            "no task is running that could be the owner: call this from a coroutine, or pass owner="
        )
    return task


def when_ended(owner: asyncio.Task[Any], clean_up: CleanUp) -> Owned:
    """Run the clean-up when the owner ends; returns the owner's clean-ups, to remove it again."""
    owned = _owned.get(owner)
    if owned is None:
        owned = _owned[owner] = Owned()
        owner.add_done_callback(_released_by_asyncio)
    if owned.released or owner.done():
        raise RuntimeError(
            f"{owner.get_name()} has ended, or was abandoned, so it cannot be an owner"
        )
    owned.add(clean_up)
    return owned


def reason_of(task: asyncio.Task[Any]) -> Reason:
    """Return why a finished task ended, without marking its exception as retrieved."""
    if task.cancelled():
        return "shutdown"
    error: BaseException | None = task._exception
    return error or "normal"


def _released_by_asyncio(task: asyncio.Task[Any]) -> None:
    if (owned := _owned.pop(task, None)) is not None:
        owned.release(reason_of(task))
