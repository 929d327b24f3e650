"""Whether the store answers, and when to ask it again. No I/O, no clock."""

from __future__ import annotations

from moored.kernel import Backoff

__all__ = ["StoreHealth"]


class StoreHealth:
    """Up until a call fails; then down, with one attempt at a time, until one works."""

    def __init__(self, backoff: Backoff, patience: float) -> None:
        self._backoff = backoff
        self._patience = patience
        #: Why the store counts as down; None while it is up.
        self.error: Exception | None = None
        #: Since when it has been down.
        self.since = 0.0
        #: When it may be asked again.
        self.retry_at = 0.0
        self._trying = False

    @property
    def up(self) -> bool:
        """Whether the last call worked."""
        return self.error is None

    def admit(self, now: float) -> bool:
        """Whether a call may be made now; in an outage one is let through now and then."""
        if self.error is None:
            return True
        if now < self.retry_at:
            return False
        # Who asks while this attempt is under way need not find out the slow way as well.
        self.retry_at = now + self._patience
        self._trying = True
        return True

    def failed(self, error: Exception, now: float) -> bool:
        """A call failed; returns whether it is this one that shows the outage."""
        first = self.error is None
        if first:
            self.since = now
        self.error = error
        if first or self._trying:
            self.retry_at = now + self._backoff.fail()
        # Otherwise it is one of many that were under way when the outage began, and no news.
        self._trying = False
        return first

    def worked(self, now: float) -> float | None:
        """A call was answered; returns how long the outage lasted that ends with this, if any."""
        if self.error is None:
            return None
        self._backoff.succeed()
        self.error = None
        self._trying = False
        return now - self.since
