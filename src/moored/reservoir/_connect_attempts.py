"""The attempts to open connections: their outcomes, and when the next one may begin."""

from __future__ import annotations

import logging
import math
from collections import Counter

from moored.kernel import Backoff, Clock, Recorder, describe, duration

from ._budget import LeaseDenied
from ._sqlstate import Meaning, meaning_of

__all__ = ["ConnectAttempts"]

log = logging.getLogger("moored.reservoir")

#: First and longest backoff after a failed connect.
FAILED = (0.25, 5.0)
#: The same with `fail_fast`, where callers get the last error until a connect succeeds.
QUICK = (0.25, 0.5)
#: The same if the server refused because of too many connections or connects.
THROTTLED = (1.0, 30.0)


class ConnectAttempts:
    """Counts and reports the attempts of one reservoir, with a backoff after failures.

    :param patience: an outage that lasts for so many seconds is reported as an error.
    :param quick: try again soon, because callers get an error until a connect succeeds.
    """

    def __init__(
        self, name: str, recorder: Recorder, clock: Clock, *, patience: float, quick: bool
    ) -> None:
        self._name, self._recorder, self._clock = name, recorder, clock
        self._patience = patience
        # After a failure no connect begins before `_pause_until`. Of several connects that fail
        # together only one counts: `_failed_at` is when the last counted one failed.
        self._pause_until = -math.inf
        self._failed_at = -math.inf
        self._failing = Backoff(*(QUICK if quick else FAILED), jitter="half", clock=clock)
        self._throttled = Backoff(*THROTTLED, jitter="half", clock=clock)
        self._failing_since: float | None = None
        self._outage_reported = False
        #: Whether the last attempt failed because the server could not be reached.
        self.unreachable = False
        self.last_error: BaseException | None = None
        #: Failures by reason, and the total seconds of successful attempts.
        self.failures: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def pause(self) -> float:
        """Seconds until the next connect may begin; at most 0 if it may begin now."""
        return self._pause_until - self._clock.monotonic()

    def end_pause(self) -> None:
        """Let the next connect begin now."""
        self._pause_until = -math.inf

    @property
    def failing_for(self) -> float | None:
        """Seconds since connecting began to fail; None while it succeeds."""
        if self._failing_since is None:
            return None
        return self._clock.monotonic() - self._failing_since

    @property
    def error(self) -> BaseException | None:
        """The error of the last attempt; None while connecting succeeds."""
        return self.last_error if self._failing_since is not None else None

    def failed(self, stage: str, error: BaseException, began: float) -> bool:
        """Record a failed attempt; return whether the outage has just exceeded the patience."""
        now = self._clock.monotonic()
        self.failures[stage] += 1
        # A full cluster is not a failure of the server.
        denied = isinstance(error, LeaseDenied)
        if self._failing_since is None or (not denied and isinstance(self.last_error, LeaseDenied)):
            self._failing_since = now
        self.last_error = error
        throttled = meaning_of(error) is Meaning.THROTTLED
        if began >= self._failed_at:
            wait = (self._throttled if throttled else self._failing).fail()
            # Try again no later than when the outage must be reported, to report it in time.
            left = self._failing_since + self._patience - now
            wait = left if 0 < left < wait and not (throttled or denied) else wait
            self._failed_at = now
            self._pause_until = now + wait
            text = f"could not open a connection ({stage}); next try in {duration(wait)}"
            self._recorder.record(self._name, text, kind="failure", cause=error)
            log.warning("%s: %s: %s", self._name, text, describe(error))
        self.unreachable = stage == "connect" and not throttled
        lasted = now - self._failing_since
        if denied or self._outage_reported or lasted < self._patience:
            return False
        self._outage_reported = True
        log.error("%s: no connection could be opened for %s", self._name, duration(lasted))
        return True

    def succeeded(self, began: float) -> None:
        """Record a successful attempt."""
        self.seconds += self._clock.monotonic() - began
        if (lasted := self.failing_for) is not None:
            text = f"connecting succeeds again after {duration(lasted)}"
            log.info("%s: %s", self._name, text)
            self._recorder.record(self._name, text)
        self._failing_since = None
        self._outage_reported = self.unreachable = False
        # A connect that began before the last failure does not prove that the server recovered.
        if began >= self._failed_at:
            self._failing.succeed()
            self._throttled.succeed()
            self.end_pause()
