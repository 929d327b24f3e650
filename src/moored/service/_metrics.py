"""The metrics, read from the tree and the monitor when somebody scrapes them."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import moored
from moored.kernel import Event, Tree

from ._health import HTTP
from ._hub import Hub
from ._view import View

__all__ = ["EventCounter", "registry_of"]

#: Components come and go without end (one for each account, say); a metric's series must not.
MAX_COMPONENTS = 200
OTHERS = "others"


class EventCounter:
    """A sink of the recorder that counts its events by component and kind."""

    def __init__(self, *, max_components: int = MAX_COMPONENTS) -> None:
        self._max_components = max_components
        self._components: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Count one event; beyond so many components, under one common name."""
        with self._lock:
            component = event.component
            if component not in self._components:
                if len(self._components) < self._max_components:
                    self._components.add(component)
                else:
                    component = OTHERS
            self._counts[component, event.kind] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """How many events there were of each (component, kind)."""
        with self._lock:
            return dict(self._counts)


def registry_of(
    view: View, events: EventCounter, hub: Hub, more: Iterable[Collector] = ()
) -> CollectorRegistry:
    """A registry of this service alone: another one in the same process has its own."""
    registry = CollectorRegistry()
    registry.register(_Collector(view, events, hub))
    for collector in more:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


class _Collector(Collector):
    def __init__(self, view: View, events: EventCounter, hub: Hub) -> None:
        self._view = view
        self._events = events
        self._hub = hub

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: what there is depends on the tree."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        yield from self._tree()
        yield from self._conditions()
        yield from self._recorder()
        yield from self._streams()

    def _service(self) -> Iterator[Metric]:
        build = {"version": moored.__version__, "python": platform.python_version()}
        yield InfoMetricFamily("moored_build", "What runs here.", build)
        ready = float(HTTP[self._view.status] == 200)
        yield GaugeMetricFamily("moored_active", "1 while /v1/health answers 200.", ready)
        health = GaugeMetricFamily(
            "moored_health", "1 for the word that says how a part is.", labels=["part", "health"]
        )
        for part, said in self._view.words().items():
            for word in HTTP:
                health.add_metric([part, word], float(said == word))
        yield health
        yield GaugeMetricFamily(
            "moored_uptime_seconds",
            "Seconds since the service began to start.",
            self._view.uptime,
        )

    def _tree(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("moored_child_up", "1 while a child is running.", labels=["path"])
        restarts = CounterMetricFamily(
            "moored_child_restarts",
            "How often a child failed and was started again.",
            labels=["path"],
        )
        for path, node in _paths(self._view.tree()):
            up.add_metric([path], float(node.state == "running"))
            restarts.add_metric([path], node.restarts)
        yield up
        yield restarts

    def _conditions(self) -> Iterator[Metric]:
        met = GaugeMetricFamily(
            "moored_condition_met", "1 while a condition is met.", labels=["name"]
        )
        for name, condition in self._view.monitor.conditions().items():
            met.add_metric([name], float(condition.met))
        yield met

    def _recorder(self) -> Iterator[Metric]:
        recorded = CounterMetricFamily(
            "moored_events",
            "Events recorded, by component and kind.",
            labels=["component", "kind"],
        )
        for (component, kind), count in self._events.counts().items():
            recorded.add_metric([component, kind], count)
        yield recorded
        now = self._view.recorder.statistics()
        yield CounterMetricFamily(
            "moored_events_dropped", "Events let go because a ring was full.", now.dropped
        )
        yield CounterMetricFamily(
            "moored_sink_errors", "Times that a sink of the recorder failed.", now.sink_errors
        )

    def _streams(self) -> Iterator[Metric]:
        now = self._hub.statistics()
        yield GaugeMetricFamily("moored_streams", "Open streams of /v1/events.", now.clients)
        yield CounterMetricFamily(
            "moored_stream_events_dropped", "Events that a slow stream lost.", now.dropped
        )
        yield CounterMetricFamily(
            "moored_streams_refused", "Streams refused because there were too many.", now.refused
        )


def _paths(tree: Tree, above: str = "") -> Iterator[tuple[str, Tree]]:
    path = f"{above}/{tree.name}" if above else tree.name
    yield path, tree
    for child in tree.children:
        yield from _paths(child, path)
