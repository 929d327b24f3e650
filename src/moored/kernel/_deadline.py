"""One time limit for a whole operation, shared by its steps."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from types import TracebackType

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

    def enforce(self, what: str = "the operation") -> Enforcement:
        """Return an `async with` block that is cancelled when the deadline expires.

        It raises `DeadlineExceeded` only if this deadline ended the block: other timeouts and
        cancellations pass through. If the deadline has expired already, the block is not entered.
        """
        return Enforcement(self, what)

    def __repr__(self) -> str:
        if self._at == math.inf:
            return "<Deadline never>"
        left = f"{duration(self.remaining())} left"
        return f"<Deadline of {self._given:g} s, {'expired' if self.expired else left}>"

    def _end(self) -> None:
        """Expire now: the timer of the block has fired, perhaps a little early."""
        self._at = min(self._at, self._clock.monotonic())

    def _words(self, what: str) -> str:
        over = self._clock.monotonic() - self._at
        return (
            f"{what} did not end within {self._given:g} s (the deadline was {over:.3f} s ago); "
            "allow more time, or find out what took so long"
        )


@dataclass(slots=True, eq=False, repr=False)
class Enforcement:
    """The block made by `Deadline.enforce`."""

    _deadline: Deadline
    _what: str
    _scope: asyncio.Timeout | None = None

    async def __aenter__(self) -> Deadline:
        self._deadline.check(self._what)
        self._scope = asyncio.timeout(self._deadline.timeout)
        await self._scope.__aenter__()
        return self._deadline

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as ended:
            # Only the scope raises here; a TimeoutError of the block itself passes through.
            self._deadline._end()
            raise DeadlineExceeded(self._deadline._words(self._what)) from ended.__cause__
