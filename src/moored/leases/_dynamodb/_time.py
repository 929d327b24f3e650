"""The server's time, as far as a client can know it.

DynamoDB has no clock in its expressions, so what is compared there must come from the client. This
machine's wall clock decides nothing: every response carries a `Date`, which is the server's time
cut to the second, and which was written between sending the request and receiving the answer. So
each response gives two bounds for the distance between the server's clock and this machine's
monotonic one, and all responses together give narrower ones: a second wide at first, about a round
trip wide after some tens of requests.

Whoever needs the time takes the bound that is safe for him: a lease is written to end late (by
`latest`), and counts as ended late (by `earliest`). So it is never given away before its holder's
own deadline, whatever the wall clocks of the machines say; it may only be given away later, by as
much as the bounds are apart.
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

#: How much faster or slower the two clocks may run: several times what oscillators do.
_DRIFT = 200e-6
#: How wrong the wall clock is taken to be while the server has not said its time.
_UNKNOWN = 1.0
#: How often something is done again because the time was wrong.
_CORRECTIONS = 3


class ServerTime:
    """Bounds for the time of the server, in seconds since 1970.

    `skew` is by how much the clocks of two servers behind one name may differ.
    """

    def __init__(self, clock: Clock, *, skew: float = 0.0) -> None:
        self._clock = clock
        self._skew = skew
        # Bounds for (server's time - monotonic time), as they were at `_at`.
        self._low = 0.0
        self._high = 0.0
        self._at: float | None = None
        #: How often a response has shown that the bounds were wrong: one of the clocks jumped.
        self.corrections = 0

    def monotonic(self) -> float:
        """This machine's own time, to say when a request was sent and answered."""
        return self._clock.monotonic()

    def observe(self, date: str | None, *, sent: float, received: float) -> None:
        """A request that was sent and answered at these monotonic times carried this date."""
        said = _seconds(date)
        if said is None:
            return
        low = said - self._skew - received
        high = said + 1.0 + self._skew - sent
        known_low, known_high = self._bounds(received)
        if low > known_high or high < known_low:
            self.corrections += 1
            known_low, known_high = low, high
        elif self._at is None:
            known_low, known_high = low, high
        self._low, self._high = max(low, known_low), min(high, known_high)
        self._at = received

    def earliest(self) -> float:
        """A time that the server's clock has certainly reached."""
        now = self._clock.monotonic()
        return now + self._bounds(now)[0]

    def latest(self) -> float:
        """A time that the server's clock has certainly not passed."""
        now = self._clock.monotonic()
        return now + self._bounds(now)[1]

    def reached(self) -> int:
        """The `earliest` time in milliseconds: what ends before this has certainly ended."""
        return int(self.earliest() * 1000)

    def end_of(self, ttl: float) -> int:
        """The millisecond at which what is written now, to live so long, may end."""
        return math.ceil((self.latest() + ttl) * 1000)

    def likely(self) -> float:
        """The wall clock's time, moved into the bounds: right to the millisecond where the
        machine's clock is kept by a time service, and within the bounds where it is not."""
        now = self._clock.monotonic()
        low, high = self._bounds(now)
        return min(max(self._clock.wall(), now + low), now + high)

    def wall_error(self) -> float:
        """By how many seconds this machine's wall clock is certainly wrong, 0.0 if maybe not."""
        return self._clock.wall() - self.likely()

    async def settled(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Do what writes a time; again, if its own answers show that the time was wrong.

        The attempt is given the millisecond by which a lease of its own must not have ended to live
        on. It stays the same when it is repeated: what it wrote by the wrong time may have ended.
        """
        lives = self.reached()
        for _ in range(_CORRECTIONS):
            before = self.corrections
            answer = await attempt(min(lives, self.reached()))
            if self.corrections == before:
                break
        return answer

    def __repr__(self) -> str:
        return f"<ServerTime known to {self.latest() - self.earliest():.3f} s>"

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
        said = parsedate_to_datetime(date)
    except ValueError:
        return None
    # A date whose zone is not told is in UTC, as all dates of HTTP are.
    return (said if said.tzinfo else said.replace(tzinfo=UTC)).timestamp()
