"""The statistics of a reservoir, with the same names as in the metrics and the docs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["BUCKETS", "DISCARDS", "FAILURES", "Latency", "Statistics"]

#: Two buckets for each octave, so that a 99th percentile means something.
STEPS = (1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
#: The upper bounds of the buckets of the wait histogram, in seconds: from 0.1 ms to 10 s.
BUCKETS = (
    *(round(10.0**power * step, 6) for power in range(-4, 1) for step in STEPS),
    10.0,
)

#: The reasons for which connections are closed, and the steps at which opening one may fail.
DISCARDS = (
    *("bad", "closed", "drained", "expired_on_checkout", "expired_on_return", "expired_on_scan"),
    *("failed_check", "guard_on_checkout", "guard_on_return", "guard_on_scan", "idle"),
    *("lease_lost", "not_kept", "replaced_ahead", "reservoir_full"),
)
FAILURES = ("configure", "connect", "lease", "rate_limit", "token")


class Latency:
    """A histogram of how long callers waited."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        """Count a caller that waited for this many seconds."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1


class Statistics(NamedTuple):
    """The current numbers of a reservoir, and its counters since it was opened."""

    #: Ready connections.
    size: int
    #: Connections in use.
    in_use: int
    #: Connects in progress.
    in_flight: int
    #: Closes in progress.
    closing: int
    #: How many connections the reservoir keeps, ready or in use.
    target: int
    #: The maximum number of connections.
    max_size: int
    #: Waiting callers.
    waiting: int
    #: Whether new callers are refused because the queue is too slow.
    overloaded: bool
    #: Connections handed out, including those that failed their check and were replaced.
    checkouts: int
    #: Callers that had to wait.
    queued: int
    #: Checkouts that found no ready connection.
    empty: int
    #: Callers that were refused instead of waiting.
    refused: int
    #: Callers whose timeout expired while they waited.
    timeouts: int
    #: Total seconds that callers waited.
    wait_seconds: float
    #: Total seconds that connections were in use.
    usage_seconds: float
    #: Connections returned.
    returns: int
    #: Connections opened.
    refills: int
    #: Total seconds that opening them took.
    refill_seconds: float
    #: Connections closed, by reason.
    discards: Mapping[str, int] = MappingProxyType({})
    #: Failed attempts to open a connection, by step.
    refill_failures: Mapping[str, int] = MappingProxyType({})
    #: Leases held by the connections of this reservoir.
    leases_held: int = 0
    #: Connections that the rate limit allows now, as far as this process knows.
    rate_tokens_left: float = 0.0
    #: Seconds for which the first waiting caller has waited; 0.0 if none waits.
    longest_wait: float = 0.0
    #: Seconds for which the server has not answered; 0.0 if it answers, as far as known.
    silent: float = 0.0
    #: How many waits fell into each bucket of `BUCKETS`; the last number is for all longer ones.
    latency: tuple[int, ...] = ()
