"""The outages of a stream: a record, and a log line at the begin and the end of each.

An outage begins with the first failure and ends when the stream is active again. Further attempts
that fail for the same reason are counted, and logged at level debug.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from moored.kernel import Clock, counted, duration

__all__ = ["Outage", "Outages"]

log = logging.getLogger("moored.postgres")


@dataclass
class Outage:
    """A time in which the stream was not active."""

    #: The first and the last failure.
    cause: str
    last: str
    #: When it began, in seconds since 1970, and how many attempts have failed.
    began: float
    failures: int = 1
    #: Its duration in seconds; None while it lasts.
    took: float | None = None


class Outages:
    """The current outage, and the last one that has ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: When the current outage began, in monotonic seconds.
        self.since = 0.0
        self._next_try = 0.0
        self.now: Outage | None = None
        self.before: Outage | None = None
        self._was_active = False

    def failed(self, why: str, wait: float) -> None:
        """Record a failed attempt or a lost stream; `wait` is the time to the next attempt."""
        at = self._clock.monotonic()
        self._next_try = at + wait
        next_try = f"next try in {duration(wait)}"
        if self.now is None:
            self.since, self.now = at, Outage(why, why, self._clock.wall())
            what = "the stream was lost" if self._was_active else "no connection yet"
            log.warning("%s: %s; %s", what, why, next_try)
            return
        now, changed = self.now, why != self.now.last
        now.failures += 1
        now.last = why
        level = logging.WARNING if changed else logging.DEBUG
        log.log(level, "still no stream after %s: %s; %s", duration(at - self.since), why, next_try)

    def recovered(self) -> None:
        """End the current outage: the stream is active."""
        self._was_active = True
        if (now := self.now) is None:
            return
        now.took = self._clock.monotonic() - self.since
        self.now, self.before = None, now
        tries = counted(now.failures, "failure")
        log.info("the stream is back after %s and %s: %s", duration(now.took), tries, now.cause)

    def report(self) -> dict[str, Any]:
        """Return both outages, in types that JSON can represent."""
        at = self._clock.monotonic()
        current = None
        if self.now is not None:
            current = vars(self.now) | {
                "took": at - self.since,
                "next_try": max(0.0, self._next_try - at),
            }
        return {
            "outage": current,
            "last_outage": None if self.before is None else dict(vars(self.before)),
        }
