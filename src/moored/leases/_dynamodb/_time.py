"""The server's time, as far as a client can know it.

DynamoDB's expressions have no clock, so the times that they compare must come from the client. This
machine's wall clock is not trusted. Every response has a `Date`: the server's time, truncated to
the second, at a moment between sending the request and receiving the response. So each response
gives two bounds for the difference between the server's clock and this machine's monotonic clock,
and all responses together give narrower ones: a second wide at first, about a round trip wide after
some tens of requests.

Each use takes the bound that is safe: the expiry of a lease is computed from `latest`, and compared
with `earliest`. So a lease is never granted to another holder before its holder's own deadline,
however wrong the wall clocks are; it may only be granted later, by the width of the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeVar

from moored.kernel import Clock

__all__ = ["ServerTime"]

T = TypeVar("T")

#: The largest drift between the two clocks, in seconds per second: several times that of real ones.
_DRIFT = 200e-6
#: The assumed error of the wall clock, in seconds, before the first response.
_UNKNOWN = 1.0
#: Attempts of one write while its responses show that the bounds were wrong.
_CORRECTIONS = 3


class ServerTime:
    """Bounds for the time of the server, in seconds since 1970.

    `skew` is by how many seconds the clocks of two servers behind one name may differ.
    """

    def __init__(self, clock: Clock, *, skew: float = 0.0) -> None:
        self._clock = clock
        self._skew = skew
        # Bounds for (server's time - monotonic time), as they were at `_at`.
        self._low = 0.0
        self._high = 0.0
        self._at: float | None = None
        #: Responses that contradicted the bounds: one of the clocks was changed.
        self.corrections = 0

    def observe(self, date: str | None, *, sent: float, received: float) -> None:
        """Narrow the bounds by the date of a response; the other times are monotonic."""
        server = _seconds(date)
        if server is None:
            return
        low = server - self._skew - received
        high = server + 1.0 + self._skew - sent
        known_low, known_high = self._bounds(received)
        if low > known_high or high < known_low:
            self.corrections += 1
            known_low, known_high = low, high
        elif self._at is None:
            known_low, known_high = low, high
        self._low, self._high = max(low, known_low), min(high, known_high)
        self._at = received

    def earliest(self) -> float:
        """Return a time that the server's clock has certainly reached."""
        now = self._clock.monotonic()
        return now + self._bounds(now)[0]

    def latest(self) -> float:
        """Return a time that the server's clock has certainly not passed."""
        now = self._clock.monotonic()
        return now + self._bounds(now)[1]

    def reached(self) -> int:
        """Return `earliest` in milliseconds: a lease that expires before it has expired."""
        return int(self.earliest() * 1000)

    def end_of(self, ttl: float) -> int:
        """Return the expiry, in milliseconds, of a lease that is written now with this ttl."""
        return math.ceil((self.latest() + ttl) * 1000)

    def likely(self) -> float:
        """Return the wall clock's time, moved into the bounds: exact if the machine's clock is
        synchronized, and within the bounds if it is not."""
        now = self._clock.monotonic()
        low, high = self._bounds(now)
        return min(max(self._clock.wall(), now + low), now + high)

    def wall_error(self) -> float:
        """Return by how many seconds, at least, this machine's wall clock is wrong."""
        return self._clock.wall() - self.likely()

    async def settled(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Run a write; again, if its own responses show that the bounds were wrong.

        `attempt` gets the time in milliseconds that the expiry of an existing lease must not be
        before. A repetition does not get a later time: the lease that the first attempt wrote by
        wrong bounds may expire before that.
        """
        lives = self.reached()
        for _ in range(_CORRECTIONS):
            before = self.corrections
            answer = await attempt(min(lives, self.reached()))
            if self.corrections == before:
                break
        return answer

    def _bounds(self, now: float) -> tuple[float, float]:
        if self._at is None:
            offset = self._clock.wall() - now
            return offset - _UNKNOWN, offset + _UNKNOWN
        drift = _DRIFT * abs(now - self._at)
        return self._low - drift, self._high + drift


def _seconds(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        parsed = parsedate_to_datetime(date)
    except ValueError:
        return None
    # A date without a zone is in UTC, as all dates of HTTP are.
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
