"""Detects that the queue of callers is permanently too slow."""

from __future__ import annotations

import math

__all__ = ["Overload"]


class Overload:
    """Whether every checkout of the last interval waited longer than the target.

    A queue that is long for a moment absorbs a burst. A queue that is never short only delays all
    callers. So the shortest wait of an interval decides, and the first checkout that waits no
    longer than the target ends the overload.
    """

    __slots__ = ("_best", "_ends", "_interval", "_target", "overloaded")

    def __init__(self, target: float, interval: float) -> None:
        self._target = target
        self._interval = interval
        self._best = math.inf
        self._ends = -math.inf
        #: Whether new callers should be refused instead of waiting.
        self.overloaded = False

    def served(self, waited: float, now: float) -> None:
        """Note that a caller got a connection after waiting for this many seconds."""
        if waited <= self._target:
            self.overloaded = False
        if now >= self._ends:
            # An interval begins with a checkout, so that a time without callers does not count.
            if self._best > self._target and self._best < math.inf:
                self.overloaded = waited > self._target
            self._best = math.inf
            self._ends = now + self._interval
        self._best = min(self._best, waited)
