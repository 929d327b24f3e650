"""The outages of a stream: one log line when it is lost, one when it is back, and a record of both.

An outage begins with the first failure and ends when the stream is active again. Every further try
that fails in the same way is counted, and logged for debugging only.
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

    #: What failed first, and what failed last.
    cause: str
    last: str
    #: When it began, in seconds since 1970, and how many tries have failed.
    began: float
    failures: int = 1
    #: How many seconds it took; None while it lasts.
    took: float | None = None


class Outages:
    """The outage that there is now, and the one before."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = 0.0
        self._next_try = 0.0
        self.now: Outage | None = None
        self.before: Outage | None = None
        self._was_active = False

    def failed(self, why: str, wait: float) -> None:
        """A try has failed, or the stream was lost; the next try is after this wait."""
        at = self._clock.monotonic()
        self._next_try = at + wait
        next_try = f"next try in {duration(wait)}"
        if self.now is None:
            self._since, self.now = at, Outage(why, why, self._clock.wall())
            what = "the stream was lost" if self._was_active else "no connection yet"
            log.warning("%s: %s; %s", what, why, next_try)
            return
        now, changed = self.now, why != self.now.last
        now.failures += 1
        now.last = why
        level = logging.WARNING if changed else logging.DEBUG
        log.log(
            level, "still no stream after %s: %s; %s", duration(at - self._since), why, next_try
        )

    def recovered(self) -> None:
        """The stream is active."""
        self._was_active = True
        if (now := self.now) is None:
            return
        now.took = self._clock.monotonic() - self._since
        self.now, self.before = None, now
        tries = counted(now.failures, "failure")
        log.info("the stream is back after %s and %s: %s", duration(now.took), tries, now.cause)

    def report(self) -> dict[str, Any]:
        """Both, as JSON can hold them; seconds since 1970, and seconds."""
        at = self._clock.monotonic()
        current = None
        if self.now is not None:
            current = _plain(self.now) | {
                "took": at - self._since,
                "next_try": max(0.0, self._next_try - at),
            }
        return {
            "outage": current,
            "last_outage": None if self.before is None else _plain(self.before),
        }


def _plain(outage: Outage) -> dict[str, Any]:
    return dict(vars(outage))
