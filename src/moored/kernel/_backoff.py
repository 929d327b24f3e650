"""How long to wait before the next attempt.

The n-th failure gives the base delay b = start · factor^(n-1), capped at `max`; jitter is applied
after the cap, so that many clients that have all reached it still do not retry together:

========== ============================ =====================================================
jitter     the delay                    use it for
========== ============================ =====================================================
``none``   b                            one client, or delays that a test or a person predicts
``full``   uniform in [0, b)            many clients of one server: spreads them the widest
``half``   b + uniform in [0, b/2)      spreads, and still guarantees a pause of b
f (0…1)    b · (1 + uniform in [-f, f)) a pause near b; 0.25 is b give or take a quarter
========== ============================ =====================================================
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from ._clock import Clock
from ._errors import BackoffExhausted
from ._words import counted, duration, refuse, unmet

__all__ = ["Backoff", "Jitter"]

Jitter = Literal["none", "full", "half"] | float


@dataclass(slots=True, eq=False, repr=False)
class Backoff:
    """Exponential delays between attempts, capped and jittered.

    `start` is the first delay, and `max` the longest before jitter: the longest time after which
    a recovered server is noticed. `max_attempts` is the number of failures since the last success
    at which `fail()` raises `BackoffExhausted` instead of returning a delay; None never gives up.
    Call `succeed()` only when the connection has proven to work: one that is accepted and then
    dropped is not a success.
    """

    start: float = 1.0
    max: float = 10.0
    _: KW_ONLY
    factor: float = 2.0
    jitter: Jitter = "none"
    max_attempts: int | None = None
    clock: Clock | None = None
    #: Failures since the last success.
    attempts: int = field(default=0, init=False)
    _base: float = field(init=False)
    _failing_since: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        start, longest, factor, jitter = self.start, self.max, self.factor, self.jitter
        known = jitter in ("none", "full", "half") if isinstance(jitter, str) else 0 <= jitter <= 1
        attempts = self.max_attempts is None or self.max_attempts >= 1
        mistakes = unmet(
            ("start", start, 0 < start < math.inf, "more than 0 seconds, and finite"),
            ("max", longest, start <= longest < math.inf, f"at least {start=} seconds, and finite"),
            ("factor", factor, 1 <= factor < math.inf, "at least 1, and finite"),
            ("jitter", jitter, known, "'none', 'full', 'half' or a number from 0 to 1"),
            ("max_attempts", self.max_attempts, attempts, "at least 1, or None for no limit"),
        )
        refuse("Backoff", mistakes)
        self._base = start

    def fail(self) -> float:
        """Count a failed attempt, and return the seconds to wait before the next one."""
        clock = self.clock or Clock.current()
        self.attempts += 1
        if self._failing_since is None:
            self._failing_since = clock.monotonic()
        if self.max_attempts is not None and self.attempts >= self.max_attempts:
            raise BackoffExhausted(self._exhausted())
        base = self._base
        # The base grows step by step up to the cap: a power would overflow after a long outage.
        self._base = min(base * self.factor, self.max)
        return self._jittered(base, clock)

    def succeed(self) -> float:
        """Start over after a success; return the seconds since the first failure."""
        took = self.retrying_for
        self.attempts = 0
        self._base = self.start
        self._failing_since = None
        return took

    def fresh(self) -> Backoff:
        """Return a new backoff with the same settings and no failures."""
        return replace(self)

    @property
    def retrying_for(self) -> float:
        """Seconds since the first failure after the last success; 0.0 when nothing failed."""
        if self._failing_since is None:
            return 0.0
        return (self.clock or Clock.current()).monotonic() - self._failing_since

    def __repr__(self) -> str:
        limit = "" if self.max_attempts is None else f" of {self.max_attempts}"
        state = "nothing failed"
        if self.attempts:
            state = f"{self.attempts}{limit} failed in {duration(self.retrying_for)}"
        return (
            f"<Backoff {self.start:g} s x{self.factor:g} to {self.max:g} s, "
            f"jitter {self.jitter}: {state}>"
        )

    def _jittered(self, base: float, clock: Clock) -> float:
        if self.jitter == "none":
            return base
        chance = clock.random.random()
        if self.jitter == "full":
            return base * chance
        if self.jitter == "half":
            return base + base / 2 * chance
        return base * (1 + self.jitter * (2 * chance - 1))

    def _exhausted(self) -> str:
        return (
            f"gave up after {counted(self.attempts, 'failed attempt')} "
            f"(max_attempts={self.max_attempts}) in {duration(self.retrying_for)}; see the last "
            "failure for the reason, and raise max_attempts if the other side may still recover"
        )
