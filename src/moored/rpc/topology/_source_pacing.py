"""Rate-limit the queries to a topology source: one at a time for all connections.

During an outage each attempt to connect would query the source, several times a second, for each
connection. A source is queried about once a second at most. After a quiet period the first failure
queries it without a delay, so that a primary that has moved is found at once.

There is one `SourcePacing` for each source and loop, however many connections follow the source.
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

#: Seconds between queries in the long run, and the number of queries at once after a quiet period.
PACE, BURST = 1.0, 2.0
#: A tolerance for timers that fire early, as uvloop's do, in seconds.
EARLY = 0.002
#: Seconds after a failure during which recoveries do not wait for the source.
DISTRUST = 10.0
#: The longest period after a refused token during which the source is not queried at all.
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
        """Return the one for a source, on the running loop."""
        try:
            # Without a lock, which a fork could copy: each `setdefault` is atomic.
            loops = cls._all.setdefault(source, weakref.WeakKeyDictionary())
            return loops.setdefault(asyncio.get_running_loop(), cls(clock))
        except TypeError:  # a user's source that is not hashable or not weakly referable
            return cls(clock)

    async def ask(self, fetch: Callable[[], Awaitable[Topology]]) -> Topology:
        """Query the source, once for all concurrent callers."""
        return await self._flight.do("topology", fetch)

    # -- outcomes ------------------------------------------------------------------------------

    def answered(self, found: Topology, pace: float, now: float) -> None:
        """Note that the source has returned a topology."""
        self._left = self._tokens(pace, now) - 1.0
        self.last, self.answered_at = found, now
        self._failed_at = self._distrusted_until = self._refused_until = float("-inf")
        self._refusals.succeed()

    def failed(self, error: Exception | None, now: float) -> None:
        """Note that the source has failed; without an error, that it was too slow."""
        self._failed_at = now
        self._distrusted_until = now + DISTRUST
        if isinstance(error, TopologyRefused):
            self._refused_until = self._distrusted_until = now + self._refusals.fail()

    # -- when to query again -------------------------------------------------------------------

    def rest(self, pace: float, now: float) -> float:
        """Return the seconds until the next query; 0 also if a timer fired a little early."""
        rest = (1.0 - self._tokens(pace, now)) * pace
        return rest if rest > EARLY else 0.0

    def pause(self, pace: float, now: float) -> float:
        """Return the seconds until a source that has just failed may be queried again."""
        return max(0.0, self._failed_at + pace - now)

    def distrusted(self, now: float) -> bool:
        """Whether the source has failed recently: recoveries do not wait for it."""
        return now < self._distrusted_until

    def refused(self, now: float) -> bool:
        """Whether the source has refused the token recently: it is not queried."""
        return now < self._refused_until

    def _tokens(self, pace: float, now: float) -> float:
        return min(BURST, self._left + (now - self.answered_at) / pace)
