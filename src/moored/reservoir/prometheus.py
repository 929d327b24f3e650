"""The numbers of reservoirs and pools for Prometheus, read when somebody scrapes them.

::

    collector = ReservoirCollector(pool)
    prometheus_client.REGISTRY.register(collector)

It costs a checkout nothing: all metrics are made from `statistics()`. It needs prometheus-client,
which `moored[service]` brings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeAlias
from weakref import WeakSet

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._reservoir import Reservoir
from ._statistics import BUCKETS, Statistics

__all__ = ["ReservoirCollector"]

Source: TypeAlias = AsyncConnectionPool[Any] | ConnectionPool[Any] | Reservoir[Any]

PREFIX = "moored_reservoir_"
LABELS = ("service", "pool")

_GAUGES: dict[str, tuple[str, Callable[[Statistics], float]]] = {
    "size": ("Connections that are ready.", lambda now: now.size),
    "target": ("Connections to have before anybody waits.", lambda now: now.target),
    "in_use": ("Connections that somebody uses.", lambda now: now.in_use),
    "in_flight": ("Connections on their way.", lambda now: now.in_flight),
    "resting": (
        "Connections that a pool above keeps for later.",
        lambda now: now.resting,
    ),
    "waiting": ("Callers that wait.", lambda now: now.waiting),
    "leases_held": ("Leases that the connections hold.", lambda now: now.leases_held),
    "rate_tokens_left": (
        "Connections that could be opened at once, as far as this process knows.",
        lambda now: now.rate_tokens_left,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[Statistics], float]]] = {
    "checkouts": ("Connections handed out.", lambda now: now.checkouts),
    "empty": ("Times that a caller came and none was ready.", lambda now: now.empty),
    "refills": ("Connections opened.", lambda now: now.refills),
    "refused": ("Callers that were not let into the queue.", lambda now: now.refused),
    "timeouts": ("Callers whose time was over before they were served.", lambda now: now.timeouts),
}
_REASONS: dict[str, tuple[str, Callable[[Statistics], Mapping[str, int]]]] = {
    "discards": ("Connections that were let go, by reason.", lambda now: now.discards),
    "refill_failures": (
        "Connections that could not be opened, by reason.",
        lambda now: now.refill_failures,
    ),
}


class ReservoirCollector(Collector):
    """Shows reservoirs and pools to Prometheus, each under its service's and its own name.

    They are held weakly: one that nobody uses any more is gone from here as well.
    """

    def __init__(self, *pools: Source) -> None:
        self._lock = threading.Lock()
        self._pools: WeakSet[Source] = WeakSet()
        for pool in pools:
            self.add(pool)

    def add(self, pool: Source) -> None:
        """Show this one too; in place of a closed one, if that had the same name."""
        with self._lock:
            for other in [one for one in self._pools if _names(one) == _names(pool)]:
                if other is not pool and _reservoir(other).state != "closed":
                    service, name = _names(pool)
                    raise ValueError(
                        f"two pools of {service} are named {name}, and Prometheus could not tell "
                        "them apart: pass another name= to one of them"
                    )
                self._pools.discard(other)
            self._pools.add(pool)

    def remove(self, pool: Source) -> None:
        """Show this one no more; harmless if it was not shown."""
        with self._lock:
            self._pools.discard(pool)

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values: enough for a registry to find clashes of names."""
        yield from _families({})

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        with self._lock:
            pools = sorted(self._pools, key=_names)
        yield from _families({_names(pool): pool.statistics() for pool in pools})


def _families(numbers: Mapping[tuple[str, str], Statistics]) -> Iterator[Metric]:
    for name, (text, number_of) in _GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        for names, now in numbers.items():
            gauge.add_metric(names, number_of(now))
        yield gauge
    for name, (text, number_of) in _COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        for names, now in numbers.items():
            counter.add_metric(names, number_of(now))
        yield counter
    for name, (text, reasons_of) in _REASONS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, "reason"))
        for names, now in numbers.items():
            for reason, number in reasons_of(now).items():
                counter.add_metric((*names, reason), number)
        yield counter
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
