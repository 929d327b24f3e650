"""What a seed delays: which tasks are slow, and how exact timers are.

Beside the network's, this is the only freedom that a schedule has.
"""

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
    """Decides whether a task that could run does run, and when a timer fires."""

    def __init__(
        self, rng: random.Random, *, drift: bool, lateness: float, timer_slack: float
    ) -> None:
        self._rng = rng
        # Some seeds keep asyncio's own order, which is what programs mostly meet.
        self.on = drift and rng.random() >= _FIFO_SEEDS
        self.lateness = lateness
        self.timer_slack = timer_slack

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

    def fires_at(self, when: float, now: float) -> float:
        """When a timer with this deadline fires: up to the slack early or late, never in the past.

        A deadline that has passed already is left alone: such a timer fires in the next turn.
        """
        if when <= now:
            return when
        return max(now, when + self.timer_slack * (2 * self._rng.random() - 1))
