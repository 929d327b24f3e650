"""Prometheus metrics of reservoirs and pools, read at each scrape.

::

    collector = ReservoirCollector(pool)
    prometheus_client.REGISTRY.register(collector)

All metrics come from `statistics()`, so they do not slow down checkouts. This module needs
prometheus-client, which `moored[service]` installs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from moored.kernel.prometheus import (
    HistogramMetricFamily,
    Metric,
    SourceCollector,
    counter,
    gauge,
)

from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._reservoir import Reservoir
from ._statistics import BUCKETS, DISCARDS, FAILURES, Statistics

__all__ = ["ReservoirCollector"]

Source: TypeAlias = AsyncConnectionPool[Any] | ConnectionPool[Any] | Reservoir[Any]

PREFIX = "moored_reservoir_"
LABELS = ("service", "pool")

#: Help texts by the names in `Statistics`.
_GAUGES = {
    "size": "Ready connections.",
    "target": "Connections to keep, ready or in use.",
    "in_use": "Connections in use.",
    "in_flight": "Connects in progress.",
    "waiting": "Waiting callers.",
    "leases_held": "Leases held by connections.",
    "rate_tokens_left": "Connections that the rate limit allows now, as far as the process knows.",
    "longest_wait": "Seconds for which the first waiting caller has waited; 0 if none waits.",
    "silent": "Seconds for which the server has not answered; 0 if it answers, as far as known.",
}
_SECONDS = ("longest_wait", "silent")
_COUNTERS = {
    "checkouts": "Connections handed out.",
    "empty": "Checkouts that found no ready connection.",
    "refills": "Connections opened.",
    "refused": "Callers that were refused instead of waiting.",
    "timeouts": "Callers whose timeout expired while they waited.",
}
_REASONS = {
    "discards": ("Connections closed, by reason.", DISCARDS),
    "refill_failures": ("Failed attempts to open a connection, by step.", FAILURES),
}


class ReservoirCollector(SourceCollector[Source]):
    """Prometheus metrics of reservoirs and pools, by service and name; refers to them weakly."""

    def add(self, source: Source) -> None:
        """Add a reservoir or pool, in place of a closed one with the same name."""
        with self._lock:
            for other in [one for one in self._sources if _names(one) == _names(source)]:
                if other is not source and _reservoir(other).state != "closed":
                    service, name = _names(source)
                    raise ValueError(
                        f"two pools of {service} are named {name}, so their metrics would have the "
                        "same labels: pass another name= to one of them"
                    )
                self._sources.discard(other)
            self._sources.add(source)

    def families(self, sources: Sequence[Source]) -> Iterator[Metric]:
        """Yield the metrics of all reservoirs and pools."""
        numbers = {_names(pool): pool.statistics() for pool in sorted(sources, key=_names)}
        for kind, table in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, text in table.items():
                samples = [(names, getattr(now, name)) for names, now in numbers.items()]
                unit = "_seconds" if name in _SECONDS else ""
                yield kind(PREFIX + name + unit, text, LABELS, samples)
        for name, (text, known) in _REASONS.items():
            # Every known reason from the start, so that `rate()` sees its first event.
            zeros = dict.fromkeys(known, 0)
            yield counter(
                PREFIX + name,
                text,
                (*LABELS, "reason"),
                [
                    ((*names, reason), number)
                    for names, now in numbers.items()
                    for reason, number in {**zeros, **getattr(now, name)}.items()
                ],
            )
        yield _latency(numbers)


def _latency(numbers: Mapping[tuple[str, str], Statistics]) -> Metric:
    histogram = HistogramMetricFamily(
        f"{PREFIX}acquire_seconds",
        "Seconds until a caller got a connection; the sum includes callers that timed out.",
        labels=LABELS,
    )
    ends = [*map(str, BUCKETS), "+Inf"]
    for names, now in numbers.items():
        buckets = list(zip(ends, map(float, accumulate(now.latency)), strict=True))
        histogram.add_metric(names, buckets, now.wait_seconds)
    return histogram


def _reservoir(pool: Source) -> Reservoir[Any]:
    return pool if isinstance(pool, Reservoir) else pool.reservoir


def _names(pool: Source) -> tuple[str, str]:
    reservoir = _reservoir(pool)
    return reservoir.service, reservoir.name
