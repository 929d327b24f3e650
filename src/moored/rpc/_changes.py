"""State changes of a manager for threads, which may come from any thread and any finalizer.

A client may release its channel in `__del__`, which the garbage collector may call anywhere: inside
another change of the same thread, or in a thread whose locks the holder of this lock waits for. So
changes never nest, although the lock is reentrant, and never wait for the lock for long: a change
that cannot be made now is posted to the loop thread. The actions that follow from a change always
run on the loop thread, so that no caller waits for them.

During interpreter shutdown no thread can be started, so nothing is done: the connections end with
the process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from moored.kernel import LoopThread

from ._core import Actions
from ._managed import ManagedConnection

__all__ = ["ManagerChanges", "Work"]

#: The actions that follow from a change, by connection.
Work = list[tuple[ManagedConnection[Any], Actions]]

#: Seconds that a change waits for the lock, which is never held for long, before it is posted to
#: the loop thread.
PATIENCE = 1.0


class ManagerChanges:
    """Makes changes under a lock, and posts the actions that follow to the loop thread.

    :param carry_out: carries out the actions; called on the loop thread.
    """

    def __init__(self, lock: threading.RLock, carry_out: Callable[[Work], None]) -> None:
        self._lock = lock
        self._carry_out = carry_out
        #: Whether anything was ever posted to the loop thread.
        self.posted = False

    def under_way(self) -> bool:
        """Whether this thread is making a change: it owns the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def must_not_wait(self) -> bool:
        """Whether waiting would block forever: inside a change, or during interpreter shutdown."""
        return self.under_way() or sys.is_finalizing()

    def make(self, change: Callable[[], Work]) -> None:
        """Make a change under the lock: now, or soon on the loop thread."""
        if sys.is_finalizing():
            return
        if self.under_way():
            self._make_later(change)
            return
        try:
            now = self._lock.acquire(timeout=PATIENCE)
            work = change() if now else []
        finally:
            if self.under_way():  # also if a signal handler raised just after `acquire`
                self._lock.release()
        if now:
            self._post(work)
        else:
            self._make_later(change)

    def _post(self, work: Work) -> None:
        async def do() -> None:
            self._carry_out(work)

        if any(actions for _, actions in work) and not sys.is_finalizing():
            self._submit(do())

    def _make_later(self, change: Callable[[], Work]) -> None:
        async def do() -> None:
            with self._lock:
                work = change()
            self._carry_out(work)

        self._submit(do())

    def _submit(self, work: Coroutine[Any, Any, None]) -> None:
        self.posted = True
        LoopThread.shared().submit(work)
