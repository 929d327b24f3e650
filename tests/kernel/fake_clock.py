"""A clock that moves only when the test advances it."""

from __future__ import annotations

import random

from moored.kernel import Clock

#: 2026-11-15 12:00:00 UTC.
NOON = 1794744000.0


class FakeClock(Clock):
    """Monotonic time starts at zero, wall time at noon; both move only by `advance`.

    `jump` sets the wall time alone.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now = self.jumped = 0.0
        super().__init__(
            lambda: self.now, lambda: NOON + self.now + self.jumped, random.Random(seed)
        )

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def jump(self, seconds: float) -> None:
        self.jumped += seconds
