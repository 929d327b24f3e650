"""Whether a cancelled task ends alone, or with everything else because its event loop ends.

At its end `asyncio.run()` cancels every task, and so do many programs that are told to terminate;
asyncio does not say why a task was cancelled. Restarting a part then would start it in a loop that
is about to be closed. So a task that a stranger cancelled is looked at again a little later: a
timer dies silently with its loop, and a loop that takes long to end has cancelled tasks that have
not ended, and hardly a task that was not cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

__all__ = ["unless_loop_ends"]

#: How long a loop may take to cancel its tasks and close before they are looked at again.
LINGER = 1.0

# Looking at every task for each of thousands that end together would take minutes.
_looks: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[float, bool]] = WeakKeyDictionary()


def unless_loop_ends(callback: Callable[[], object]) -> None:
    """Call back a little later, if it has not turned out by then that the running loop ends."""
    asyncio.get_running_loop().call_later(LINGER, _look, callback)


def _look(callback: Callable[[], object]) -> None:
    if _is_ending(asyncio.get_running_loop()):
        unless_loop_ends(callback)
    else:
        callback()


def _is_ending(loop: asyncio.AbstractEventLoop) -> bool:
    now = loop.time()
    at, ending = _looks.get(loop, (-LINGER, False))
    if now - at >= LINGER / 2:
        tasks = [bool(task.cancelling()) for task in asyncio.all_tasks(loop)]
        # All were cancelled, except perhaps the one that does it, and waits for the others.
        ending = any(tasks) and tasks.count(False) <= 1
        _looks[loop] = (now, ending)
    return ending
