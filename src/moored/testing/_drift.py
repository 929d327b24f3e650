"""The delays of tasks and timers that a seed decides.

Together with the network's latency, they are all in which two schedules differ.
"""

from __future__ import annotations

import random

from ._tasks import SimTask

__all__ = ["Drift"]

# Probabilities that a turn skips a task; each task draws one for its whole life. Some tasks are
# much slower than others, because most races need a task that lags by several turns.
_HOLDS = (0.0, 0.0, 0.1, 0.25, 0.5, 0.9)
_FIFO_SEEDS = 0.1
_LATE = 0.1


class Drift:
    """Decides whether a ready task runs in this turn, and when a timer fires."""

    def __init__(
        self, rng: random.Random, *, drift: bool, lateness: float, timer_slack: float
    ) -> None:
        self._rng = rng
        # Some seeds keep asyncio's order, the usual one in production.
        self.on = drift and rng.random() >= _FIFO_SEEDS
        self.lateness = lateness
        self.timer_slack = timer_slack

    def pace(self) -> float:
        """Return the probability that a turn skips a new task."""
        return _HOLDS[int(self._rng.random() * len(_HOLDS))] if self.on else 0.0

    def holds(self, task: SimTask, skipped: set[int]) -> bool:
        """Whether this turn skips a task; `skipped` has the serials of the skipped tasks."""
        # All steps of a skipped task wait, so that their order is kept.
        if task.serial in skipped:
            return True
        if self._rng.random() < task.hold:
            skipped.add(task.serial)
            return True
        return False

    def delays(self, task: SimTask, now: float) -> bool:
        """Whether a task must wait until `task.late_until`, as on a busy machine."""
        if task.late_until < now and self._rng.random() < _LATE:
            task.late_until = now + self._rng.random() * self.lateness
        return task.late_until > now

    def fires_at(self, when: float, now: float) -> float:
        """Return the time at which a timer fires: up to `timer_slack` before or after its deadline.

        A timer whose deadline has passed fires in the next turn.
        """
        if when <= now:
            return when
        return max(now, when + self.timer_slack * (2 * self._rng.random() - 1))
