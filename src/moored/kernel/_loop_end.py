"""Tells whether a task was cancelled alone, or because its event loop is ending.

At its end `asyncio.run()` cancels every task, and so do many programs when they terminate; asyncio
does not report why a task was cancelled. Restarting a child then would start it in a loop that is
about to be closed. So a child that was cancelled by other code is restarted only a second later, by
a timer. If the loop has ended by then, the timer never fires. If the loop is still ending, nearly
all its tasks are cancelled and have not ended yet, and the restart waits for another second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

__all__ = ["unless_loop_ends"]

#: Seconds until a cancelled task is checked, and checked again.
CHECK_DELAY = 1.0

# The time and result of the last check of each loop: thousands of tasks may end together, and
# going through all tasks for each of them would take minutes.
_last_checks: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[float, bool]] = WeakKeyDictionary()


def unless_loop_ends(callback: Callable[[], object]) -> None:
    """Call the callback after `CHECK_DELAY`, or later, unless the running loop is ending."""
    asyncio.get_running_loop().call_later(CHECK_DELAY, _check, callback)


def _check(callback: Callable[[], object]) -> None:
    if _is_ending(asyncio.get_running_loop()):
        unless_loop_ends(callback)
    else:
        callback()


def _is_ending(loop: asyncio.AbstractEventLoop) -> bool:
    now = loop.time()
    at, ending = _last_checks.get(loop, (-CHECK_DELAY, False))
    if now - at >= CHECK_DELAY / 2:
        tasks = [bool(task.cancelling()) for task in asyncio.all_tasks(loop)]
        # All were cancelled, except perhaps the task that cancels the others and waits for them.
        ending = any(tasks) and tasks.count(False) <= 1
        _last_checks[loop] = (now, ending)
    return ending
