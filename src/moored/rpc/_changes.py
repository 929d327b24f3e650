"""Changes under the lock of a manager of threads, made by whoever comes, and from anywhere.

A client may give its channel back in `__del__`, and the garbage collector calls that where it
likes: in the middle of another change of the same thread, or in a thread that has some lock which
another one waits for while it has this one. So a change does not insist. The lock is reentrant, but
nothing is changed within a change: what cannot be changed now is left to the loop thread. And what
follows from a change is always done there, so that nobody waits for it.

While the interpreter ends there are no threads any more, and none can be started: then nothing is
done, as the process takes all connections with it.
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

#: What is to be done, with which connection.
Work = list[tuple[ManagedConnection[Any], Actions]]

#: How long a change waits for the lock, which is held for moments only, before it is left to the
#: loop thread.
PATIENCE = 1.0


class ManagerChanges:
    """Makes changes, and has done what follows from them.

    :param carry_out: does it, on the loop thread.
    """

    def __init__(self, lock: threading.RLock, carry_out: Callable[[Work], None]) -> None:
        self._lock = lock
        self._carry_out = carry_out
        #: Whether the loop thread has had anything to do.
        self.posted = False

    def under_way(self) -> bool:
        """Whether this thread is in the middle of one, as `threading.Condition` finds out."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def must_not_wait(self) -> bool:
        """Whether nothing can come while this thread waits: it changes something, or all ends."""
        return self.under_way() or sys.is_finalizing()

    def make(self, change: Callable[[], Work]) -> None:
        """Change something under the lock: now, if that can be."""
        if sys.is_finalizing():
            return
        if self.under_way():
            self._make_later(change)
            return
        try:
            now = self._lock.acquire(timeout=PATIENCE)
            work = change() if now else []
        finally:
            if self.under_way():  # also if a signal came in the moment after it was taken
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
