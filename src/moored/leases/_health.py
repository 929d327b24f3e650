"""Whether the store answers, and when to try again. No I/O, no clock."""

from __future__ import annotations

import math

from moored.kernel import Backoff

__all__ = ["StoreHealth"]


class StoreHealth:
    """Up until a call fails; then down, with one attempt at a time, until a call succeeds."""

    def __init__(self, backoff: Backoff, timeout: float) -> None:
        self._backoff = backoff
        self._timeout = timeout
        #: The error that made the store count as down; None while it is up.
        self.error: Exception | None = None
        #: When the outage began, in monotonic seconds.
        self.since = 0.0
        #: When the next attempt may be made, in monotonic seconds.
        self.retry_at = 0.0
        self._trying = False
        self._ended = -math.inf

    @property
    def up(self) -> bool:
        """Whether the last call was answered."""
        return self.error is None

    def admit(self, now: float) -> bool:
        """Whether a call may be made now; in an outage, one attempt at each `retry_at`."""
        if self.error is None:
            return True
        if now < self.retry_at:
            return False
        # Other calls fail at once while this attempt is in flight.
        self.retry_at = now + self._timeout
        self._trying = True
        return True

    def failed(self, error: Exception, now: float) -> bool:
        """Record a failed call; returns whether it is the first of an outage."""
        first = self.error is None
        if first:
            self.since = now
        self.error = error
        if first or self._trying:
            self.retry_at = now + self._backoff.fail()
        # Otherwise the call was in flight when the outage began: the backoff stays as it is.
        self._trying = False
        return first

    def worked(self, now: float) -> float | None:
        """Record an answered call; returns the duration of the outage that it ends, or None."""
        if self.error is None:
            return None
        self._backoff.succeed()
        self.error = None
        self._trying = False
        self._ended = now
        return now - self.since

    def in_outage(self, now: float) -> bool:
        """Whether the store is down, or was until just now: late renewals may be in flight."""
        return self.error is not None or now - self._ended < self._timeout
