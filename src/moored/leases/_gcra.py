"""The arithmetic of a rate limit (GCRA): its whole state is one number per key, `full_at`.

That is the time at which the limit will be full again (GCRA's theoretical arrival time). Each token
adds 1/rate to it; a token is free while the sum is at most burst/rate ahead of now. So any window
of w seconds holds at most rate·w + burst tokens.
"""

from __future__ import annotations

import math

from ._store import Taken

__all__ = ["take"]

# Times are floats: rounding must neither lose a whole token nor make a wait too short.
_ROUNDING = 1e-6


def take(
    full_at: float | None, now: float, *, rate: float, burst: int, tokens: int
) -> tuple[float, Taken]:
    """Take up to `tokens`; returns the new `full_at`, and what was taken.

    After the clock was set back, `full_at` may lie further ahead than burst/rate. The limit then
    counts as empty now: that never grants too much, and does not wait for the old time.
    """
    depth = burst / rate
    ahead = 0.0 if full_at is None else min(max(full_at - now, 0.0), depth)
    free = (depth - ahead) * rate + _ROUNDING
    granted = min(tokens, math.floor(free))
    left = free - granted
    # `left` is below 1 when fewer were granted than wanted, so the caller gets a wait above 0.
    wait = 0.0 if left >= 1 else (1 - left) / rate + _ROUNDING
    return now + ahead + granted / rate, Taken(granted, wait)
