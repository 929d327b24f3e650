"""A reservoir in numbers: the same names here, in the metrics and in the docs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["BUCKETS", "DISCARDS", "FAILURES", "Latency", "Statistics"]

#: The upper ends, in seconds, of the classes into which waits are sorted.
BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)

#: Why connections are let go, and at which step of opening one it may fail.
DISCARDS = (
    *("bad", "closed", "drained", "expired_on_checkout", "expired_on_return", "expired_on_scan"),
    *("failed_check", "guard_on_checkout", "guard_on_return", "guard_on_scan", "idle"),
    *("lease_lost", "not_kept", "replaced_ahead", "reservoir_full"),
)
FAILURES = ("configure", "connect", "lease", "rate_limit", "token")


class Latency:
    """How long callers waited, sorted into classes."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        """One caller waited so long."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1


class Statistics(NamedTuple):
    """What a reservoir has, and has done since it was opened."""

    #: Connections that are ready.
    size: int
    #: Connections in use.
    in_use: int
    #: Connections on their way.
    in_flight: int
    #: Connections whose close has begun and not ended.
    closing: int
    #: How many connections to have before anybody waits.
    target: int
    #: How many there may be.
    max_size: int
    #: Callers that wait.
    waiting: int
    #: Whether new callers are told at once that they would wait for too long.
    overloaded: bool
    #: Connections handed out; those too that failed their check just before.
    checkouts: int
    #: Callers that had to wait.
    queued: int
    #: Times that none was ready.
    empty: int
    #: Callers that were not let into the queue.
    refused: int
    #: Callers whose time was over before they were served.
    timeouts: int
    #: Seconds that callers waited, in all.
    wait_seconds: float
    #: Seconds that connections were in use, in all.
    usage_seconds: float
    #: Connections that came back.
    returns: int
    #: Connections opened.
    refills: int
    #: Seconds that opening them took, in all.
    refill_seconds: float
    #: Connections that were let go, by reason.
    discards: Mapping[str, int] = MappingProxyType({})
    #: Connections that could not be opened, by reason.
    refill_failures: Mapping[str, int] = MappingProxyType({})
    #: Leases that the connections of this reservoir hold.
    leases_held: int = 0
    #: Connections that could be opened at once under the rate, as far as this process knows.
    rate_tokens_left: float = 0.0
    #: How many waits ended in each class of `BUCKETS`, the last one for all above.
    latency: tuple[int, ...] = ()
