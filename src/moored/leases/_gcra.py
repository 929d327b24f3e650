"""The rate limit's arithmetic: one number per key, from which everything follows.

The number is the time at which the limit will be full again (GCRA calls it the theoretical arrival
time). Each token moves it on by 1/rate; a token is free while it lies at most burst/rate ahead.
So any window of w seconds holds at most rate·w + burst tokens.
"""

from __future__ import annotations

import math

from ._store import Taken

__all__ = ["take"]

# Times are floats: a whole token must not be missed, nor a wait be too short, for its last digit.
_ROUNDING = 1e-6


def take(
    full_at: float | None, now: float, *, rate: float, burst: int, tokens: int
) -> tuple[float, Taken]:
    """Take up to so many tokens; returns the number to keep, and what was taken.

    A clock that goes back finds the number further ahead than it can be. The limit is then taken
    to be empty as of now: that never gives too much, and it does not wait for the old time to
    come round again.
    """
    depth = burst / rate
    ahead = 0.0 if full_at is None else min(max(full_at - now, 0.0), depth)
    free = (depth - ahead) * rate + _ROUNDING
    granted = min(tokens, math.floor(free))
    left = free - granted
    # What was not granted is not free: so whoever gets too few is always told to wait.
    wait = 0.0 if left >= 1 else (1 - left) / rate + _ROUNDING
    return now + ahead + granted / rate, Taken(granted, wait)
