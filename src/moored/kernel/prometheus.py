"""The base class of all Prometheus collectors, and the collector of all links.

Importing it requires prometheus-client.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from ._extras import extra
from ._machine import Machine

with extra("service", "a Prometheus collector"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.core import HistogramMetricFamily as HistogramMetricFamily
    from prometheus_client.core import Metric as Metric
    from prometheus_client.registry import Collector

__all__ = ["LinkHolder", "LinksCollector", "Samples", "SourceCollector", "counter", "gauge"]

T = TypeVar("T")

#: For each sample of a metric: the values of its labels, and the value itself.
Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]


class SourceCollector(Collector, Generic[T]):
    """Collects the metrics of sources that are added and removed at run time.

    Sources are held weakly: the metrics of one that was garbage-collected disappear. A subclass
    yields the metric families in `families()`, which runs at every scrape, in the scraping thread.
    """

    def __init__(self, *sources: T) -> None:
        self._lock = threading.Lock()
        self._sources: WeakSet[T] = WeakSet()
        for source in sources:
            self.add(source)

    def add(self, source: T) -> None:
        """Include the metrics of this source; adding it twice has no effect."""
        with self._lock:
            self._sources.add(source)

    def remove(self, source: T) -> None:
        """Exclude the metrics of this source; harmless if it was not included."""
        with self._lock:
            self._sources.discard(source)

    @abstractmethod
    def families(self, sources: Sequence[T]) -> Iterator[Metric]:
        """Yield every metric family, without samples when there are no sources."""

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without samples, so that a registry can detect name clashes."""
        yield from self.families(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current values."""
        with self._lock:
            sources = list(self._sources)
        yield from self.families(sources)


class LinkHolder(Protocol):
    """Something that holds links: a listener, the sessions of a process, a channel manager."""

    def link_machines(self) -> Iterable[tuple[str, str, Machine]]:
        """Return the system, a name and the state machine of each link."""


class LinksCollector(SourceCollector[LinkHolder]):
    """The links of listeners, sessions and gRPC channels, by state, in one metric.

    The states are those of `link_chart`.
    """

    def families(self, sources: Sequence[LinkHolder]) -> Iterator[Metric]:
        """Yield the number of links in each state of their chart, also if it is 0."""
        numbers: dict[tuple[str, str], dict[str, int]] = {}
        for source in sources:
            for system, name, machine in source.link_machines():
                states = numbers.setdefault(
                    (system, name), dict.fromkeys(map(str, machine.chart.states), 0)
                )
                states[str(machine.state)] += 1
        yield gauge(
            "moored_links",
            "Links, by state.",
            ("system", "name", "state"),
            [
                ((*of, state), number)
                for of, states in numbers.items()
                for state, number in states.items()
            ],
        )


def gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """Return a gauge with these samples."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """Return a counter with these samples."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
