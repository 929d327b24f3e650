"""The metrics of the service, read from the tree and the monitor at each scrape."""

from __future__ import annotations

import logging
import platform
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from moored._version import __version__
from moored.kernel import Event, describe
from moored.kernel.prometheus import Samples, counter, gauge

from ._browser_streams import BrowserStreams
from ._connections import Connections
from ._health import HTTP, READY_STATES
from ._judge import GOOD
from ._view import View

__all__ = ["EventCounter", "registry_of"]

#: The states of parts that need no attention, and of those that report none.
WELL = (*GOOD, "unknown")

log = logging.getLogger("moored.service")

#: The number of components may be unbounded (one for each account); that of time series must not.
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
        """Count one event; beyond `max_components`, under the common name `others`."""
        with self._lock:
            component = event.component
            if component not in self._components:
                if len(self._components) < self._max_components:
                    self._components.add(component)
                else:
                    component = OTHERS
            self._counts[component, event.kind] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of events by (component, kind)."""
        with self._lock:
            return dict(self._counts)


def registry_of(
    view: View,
    events: EventCounter,
    streams: BrowserStreams,
    connections: Connections,
    more: Iterable[Collector] = (),
) -> CollectorRegistry:
    """Return the registry of this service; each service in a process has its own."""
    registry = CollectorRegistry()
    registry.register(_Collector(view, events, streams, connections))
    registry.register(_PartCollectors(more))
    ProcessCollector(registry=registry)
    return registry


class _PartCollectors(Collector):
    """The collectors of the parts: if one raises, only its metrics are missing from the scrape."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = collectors
        self._errors = 0

    def collect(self) -> Iterator[Metric]:
        for each in self._collectors:
            try:
                yield from list(each.collect())
            except Exception as error:
                self._errors += 1
                log.warning("the metrics collector of a part failed: %s", describe(error))
        text = "Scrapes in which the collector of a part raised an exception."
        yield counter("moored_collector_errors", text, (), _one(self._errors))


class _Collector(Collector):
    def __init__(
        self, view: View, events: EventCounter, streams: BrowserStreams, connections: Connections
    ) -> None:
        self._connections = connections
        self._view = view
        self._events = events
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        yield from self._tree()
        yield from self._recorder()
        yield from self._http()

    def _service(self) -> Iterator[Metric]:
        view = self._view
        build = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("moored_build", "The versions of Moored and of Python.", build)
        ready = float(view.status in READY_STATES)
        yield gauge("moored_active", "1 while /v1/health?ready answers 200.", (), _one(ready))
        text = "Parts that do not work, or not fully, or wait, whether they are required or not."
        bad = sum(view.truth.judged()[part].state not in WELL for part in view.truth.parts)
        yield gauge("moored_degraded", text, (), _one(bad))
        yield gauge(
            "moored_health",
            "1 for the part's current health state, 0 for the others.",
            ("part", "health"),
            [((p, each), float(now == each)) for p, now in view.parts().items() for each in HTTP],
        )
        numbers, seconds, present = view.truth.totals()
        text = "Outages that are over, by the part or server whose fault they were."
        yield counter("moored_outages", text, ("root",), _by(numbers))
        text = "Seconds of outages that are over, each from the last sign of life on."
        yield counter("moored_outage_seconds", text, ("root",), _by(seconds))
        text = "Seconds of the present outage, from the last sign of life on; 0 without one."
        yield gauge("moored_outage_lasts_seconds", text, (), _one(present))
        text = "Seconds since the service began to start."
        yield gauge("moored_uptime_seconds", text, (), _one(view.uptime))
        yield gauge(
            "moored_condition_met",
            "1 while a condition is met.",
            ("name",),
            [((name,), float(each.met)) for name, each in view.monitor.conditions().items()],
        )

    def _tree(self) -> Iterator[Metric]:
        nodes = list(self._view.tree().paths())
        up = [((path,), float(node.state == "running")) for path, node in nodes]
        yield gauge("moored_child_up", "1 while a child is running.", ("path",), up)
        restarts = [((path,), node.restarts) for path, node in nodes]
        text = "Restarts of a child after a failure."
        yield counter("moored_child_restarts", text, ("path",), restarts)

    def _recorder(self) -> Iterator[Metric]:
        yield counter(
            "moored_events",
            "Events recorded, by component and kind.",
            ("component", "kind"),
            self._events.counts().items(),
        )
        now = self._view.recorder.statistics()
        text = "Recorded events discarded because the buffer of their component was full."
        yield counter("moored_events_dropped", text, (), _one(now.dropped))
        text = "Exceptions raised by sinks of the recorder."
        yield counter("moored_sink_errors", text, (), _one(now.sink_errors))

    def _http(self) -> Iterator[Metric]:
        streams, now = self._streams.statistics(), self._connections.statistics()
        text = "Open streams of /v1/events."
        yield gauge("moored_streams", text, (), _one(streams.clients))
        text = "Events discarded because a stream was read too slowly."
        yield counter("moored_stream_events_dropped", text, (), _one(streams.dropped))
        text = "Streams refused because there were too many."
        yield counter("moored_streams_refused", text, (), _one(streams.refused))
        yield gauge("moored_http_idle", "Idle HTTP connections.", (), _one(now.idle))
        yield counter(
            "moored_http_closed",
            "HTTP connections closed by the service: timed_out, or refused to make room.",
            ("reason",),
            [(("timed_out",), now.timed_out), (("refused",), now.refused)],
        )


def _by(found: Mapping[str, float]) -> Samples:
    """Return the samples of a metric with one label."""
    return [((name,), value) for name, value in found.items()]


def _one(value: float) -> Samples:
    """Return the only sample of a metric without labels."""
    return [((), value)]
