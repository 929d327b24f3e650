"""When a queue is too slow to be worth joining."""

from __future__ import annotations

import math

__all__ = ["Overload"]


class Overload:
    """Tells whether every checkout of the last interval has waited longer than the target.

    A queue that is long for a moment is a good queue: it takes up a burst. One that is never
    short is only a delay for everybody in it. So the best wait of an interval decides, and the
    first checkout that waits no longer than the target clears it.
    """

    __slots__ = ("_best", "_ends", "_interval", "_target", "overloaded")

    def __init__(self, target: float, interval: float) -> None:
        self._target = target
        self._interval = interval
        self._best = math.inf
        self._ends = -math.inf
        #: Whether new callers should be told at once, instead of waiting.
        self.overloaded = False

    def served(self, waited: float, now: float) -> None:
        """A caller got a connection after so long."""
        if waited <= self._target:
            self.overloaded = False
        if now >= self._ends:
            # The interval begins with the first checkout, so that a quiet time proves nothing.
            if self._best > self._target and self._best < math.inf:
                self.overloaded = waited > self._target
            self._best = math.inf
            self._ends = now + self._interval
        self._best = min(self._best, waited)
