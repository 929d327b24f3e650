"""One time limit for a whole operation, shared by its steps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ._clock import Clock
from ._errors import DeadlineExceeded
from ._words import duration

__all__ = ["Deadline"]


@dataclass(slots=True, eq=False, repr=False)
class Deadline:
    """A point in time, made once and passed down, so that the steps share the remaining time.

    Make it with `Deadline.after(seconds)`. It belongs to the clock that was
    current then; `enforce` works in any loop, because it uses only the remaining time.
    """

    _at: float
    _given: float
    _clock: Clock

    @classmethod
    def after(cls, seconds: float | None, clock: Clock | None = None) -> Deadline:
        """Return a deadline this many seconds from now; None is no limit."""
        clock = clock or Clock.current()
        if seconds is None:
            return cls(math.inf, math.inf, clock)
        if math.isnan(seconds):
            raise ValueError("Deadline: seconds=nan is not a duration; use None for no limit")
        return cls(clock.monotonic() + seconds, seconds, clock)

    def remaining(self) -> float:
        """Return the seconds left: 0.0 if it has expired, infinity without a limit."""
        return self._at if self._at == math.inf else max(0.0, self._at - self._clock.monotonic())

    @property
    def timeout(self) -> float | None:
        """The seconds left, as locks and sockets expect them: None without a limit."""
        return None if self._at == math.inf else self.remaining()

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0.0

    def check(self, what: str = "the operation") -> None:
        """Raise `DeadlineExceeded` if no time is left."""
        if self.expired:
            raise DeadlineExceeded(self._words(what))

    @asynccontextmanager
    async def enforce(self, what: str = "the operation") -> AsyncIterator[Deadline]:
        """Return an `async with` block that is cancelled when the deadline expires.

        It raises `DeadlineExceeded` only if this deadline ended the block: other timeouts and
        cancellations pass through. If the deadline has expired already, the block is not entered.
        """
        self.check(what)
        scope = asyncio.timeout(self.timeout)
        try:
            async with scope:
                yield self
        except TimeoutError as error:
            # A TimeoutError of the block itself does not come from the scope's cancellation.
            if not scope.expired() or not isinstance(error.__cause__, asyncio.CancelledError):
                raise
            # The timer may have fired a little early.
            self._at = min(self._at, self._clock.monotonic())
            raise DeadlineExceeded(self._words(what)) from error.__cause__

    def __repr__(self) -> str:
        if self._at == math.inf:
            return "<Deadline never>"
        left = f"{duration(self.remaining())} left"
        return f"<Deadline of {self._given:g} s, {'expired' if self.expired else left}>"

    def _words(self, what: str) -> str:
        over = self._clock.monotonic() - self._at
        return (
            f"{what} did not end within {self._given:g} s (the deadline was {over:.3f} s ago); "
            "allow more time, or find out what took so long"
        )
