"""Which tasks a seed makes slow: the only freedom that a schedule has beside the network's."""

from __future__ import annotations

import random

from ._tasks import SimTask

__all__ = ["Drift"]

# The chance that a task is held back for a turn. Most seeds make a few tasks much slower than the
# others, because a race needs one to lag for several turns, not for one.
_HOLDS = (0.0, 0.0, 0.1, 0.25, 0.5, 0.9)
_FIFO_SEEDS = 0.1
_LATE = 0.1


class Drift:
    """Decides, when a task could run, whether it does."""

    def __init__(self, rng: random.Random, *, drift: bool, lateness: float) -> None:
        self._rng = rng
        # Some seeds keep asyncio's own order, which is what programs mostly meet.
        self.on = drift and rng.random() >= _FIFO_SEEDS
        self.lateness = lateness

    def pace(self) -> float:
        """How slow a new task is to be, for its whole life."""
        return _HOLDS[int(self._rng.random() * len(_HOLDS))] if self.on else 0.0

    def holds(self, task: SimTask, slow: set[int]) -> bool:
        """Whether a task waits for the next turn; `slow` has those that do so in this one."""
        # Whatever else the queue has for a held task waits with it: its own order is kept.
        if task.serial in slow:
            return True
        if self._rng.random() < task.hold:
            slow.add(task.serial)
            return True
        return False

    def delays(self, task: SimTask, now: float) -> bool:
        """Whether a task waits for `task.late_until`, as it would on a busy machine."""
        if task.late_until < now and self._rng.random() < _LATE:
            task.late_until = now + self._rng.random() * self.lateness
        return task.late_until > now
