"""Prometheus metrics of reservoirs and pools, read at each scrape.

::

    collector = ReservoirCollector(pool)
    prometheus_client.REGISTRY.register(collector)

It costs a checkout nothing: all metrics are made from `statistics()`. It needs prometheus-client,
which `moored[service]` brings.
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

#: Metrics by the names that they have in `Statistics`.
_GAUGES = {
    "size": "Connections that are ready.",
    "target": "Connections to have before anybody waits.",
    "in_use": "Connections in use.",
    "in_flight": "Connections on their way.",
    "waiting": "Callers that wait.",
    "leases_held": "Leases that the connections hold.",
    "rate_tokens_left": "Connections that could be opened at once, as far as this process knows.",
}
_COUNTERS = {
    "checkouts": "Connections handed out.",
    "empty": "Times that a caller came and none was ready.",
    "refills": "Connections opened.",
    "refused": "Callers that were not let into the queue.",
    "timeouts": "Callers whose time was over before they were served.",
}
_REASONS = {
    "discards": ("Connections that were let go, by reason.", DISCARDS),
    "refill_failures": ("Connections that could not be opened, by reason.", FAILURES),
}


class ReservoirCollector(SourceCollector[Source]):
    """Prometheus metrics of reservoirs and pools, by service and name. They are held weakly."""

    def add(self, source: Source) -> None:
        """Include the metrics of this one, in place of a closed one with the same name."""
        with self._lock:
            for other in [one for one in self._sources if _names(one) == _names(source)]:
                if other is not source and _reservoir(other).state != "closed":
                    service, name = _names(source)
                    raise ValueError(
                        f"two pools of {service} are named {name}, and Prometheus could not tell "
                        "them apart: pass another name= to one of them"
                    )
                self._sources.discard(other)
            self._sources.add(source)

    def families(self, sources: Sequence[Source]) -> Iterator[Metric]:
        """Yield everything that `statistics()` reports."""
        numbers = {_names(pool): pool.statistics() for pool in sorted(sources, key=_names)}
        for kind, table in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, text in table.items():
                samples = [(names, getattr(now, name)) for names, now in numbers.items()]
                yield kind(PREFIX + name, text, LABELS, samples)
        for name, (text, known) in _REASONS.items():
            # Each known reason from the beginning, so that a rate sees its first event.
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
        "Seconds until a caller got a connection; the sum has those who gave up, too.",
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
