"""When a source of topologies is asked: once at a time for all, and not too often.

During an outage each attempt to connect gives reason to ask, several times a second, for each
connection. A source answers about once a second at most; the first failure after a quiet time asks
at once all the same, so that a primary that has moved is found without delay.

It is for one source and one loop, however many connections follow it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import ClassVar

from moored.kernel import Backoff, Clock, SingleFlight

from .._errors import TopologyRefused
from ._sources import TopologySource
from ._topology import Topology

__all__ = ["PACE", "SourcePacing"]

#: Seconds for each answer in the long run, and how many may come at once after a quiet time.
PACE, BURST = 1.0, 2.0
#: How early a timer may fire, as uvloop's do, and more.
EARLY = 0.002
#: For how long after a failure nobody waits for an answer.
DISTRUST = 10.0
#: The same after the token was refused, which also keeps others from asking: it grows to this.
REFUSED = 300.0

_Loops = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "SourcePacing"]


class SourcePacing:
    """The last answer of a topology source, and when it may be queried again."""

    _all: ClassVar[weakref.WeakKeyDictionary[TopologySource, _Loops]] = weakref.WeakKeyDictionary()

    def __init__(self, clock: Clock | None = None) -> None:
        #: The last answer, and when it came.
        self.last: Topology | None = None
        self.answered_at = float("-inf")
        self._flight = SingleFlight()
        self._left = BURST
        self._failed_at = self._distrusted_until = self._refused_until = float("-inf")
        self._refusals = Backoff(DISTRUST, REFUSED, jitter=0.25, clock=clock)

    @classmethod
    def of(cls, source: TopologySource, clock: Clock | None = None) -> SourcePacing:
        """That of a source, on the running loop."""
        try:
            # Without a lock, which a fork could copy: each of these is one step.
            loops = cls._all.setdefault(source, weakref.WeakKeyDictionary())
            return loops.setdefault(asyncio.get_running_loop(), cls(clock))
        except TypeError:  # one of the user's that cannot be told from others
            return cls(clock)

    async def ask(self, fetch: Callable[[], Awaitable[Topology]]) -> Topology:
        """Query the source, once for all concurrent callers."""
        return await self._flight.do("topology", fetch)

    # -- what came of it -----------------------------------------------------------------------

    def answered(self, found: Topology, pace: float, now: float) -> None:
        """The source has returned a topology."""
        self._left = self._tokens(pace, now) - 1.0
        self.last, self.answered_at = found, now
        self._failed_at = self._distrusted_until = self._refused_until = float("-inf")
        self._refusals.succeed()

    def failed(self, error: Exception | None, now: float) -> None:
        """The source has failed; without an error, it was too slow."""
        self._failed_at = now
        self._distrusted_until = now + DISTRUST
        if isinstance(error, TopologyRefused):
            self._refused_until = self._distrusted_until = now + self._refusals.fail()

    # -- whether to ask again ------------------------------------------------------------------

    def rest(self, pace: float, now: float) -> float:
        """Seconds until the next query; a timer that fires a little early counts as due."""
        rest = (1.0 - self._tokens(pace, now)) * pace
        return rest if rest > EARLY else 0.0

    def pause(self, pace: float, now: float) -> float:
        """Seconds until a source that has just failed may be queried again."""
        return max(0.0, self._failed_at + pace - now)

    def distrusted(self, now: float) -> bool:
        """Whether the source has failed lately: callers do not wait for it."""
        return now < self._distrusted_until

    def refused(self, now: float) -> bool:
        """Whether the source has refused the token lately: it is not queried."""
        return now < self._refused_until

    def _tokens(self, pace: float, now: float) -> float:
        return min(BURST, self._left + (now - self.answered_at) / pace)
