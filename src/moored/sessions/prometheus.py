"""The numbers of sessions for Prometheus, read when somebody scrapes them.

::

    prometheus_client.REGISTRY.register(SessionsCollector(sessions))

They are added up over all accounts of a protocol: profiles and recipients appear nowhere. It needs
prometheus-client, which `moored[service]` brings.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ._sessions import Sessions

__all__ = ["SessionsCollector"]

PREFIX = "moored_sessions_"
OUTCOMES = ("acked", "rejected", "not_sent", "unknown")

_COUNTERS = {
    "received": "Things that came in and were understood.",
    "unhandled": "Frames that nobody knew what to do with.",
    "stale": "Times that an old link said something, which changed nothing.",
    "crashes": "Connections that crashed and were started again.",
    "sender_crashes": "Senders of one recipient that crashed.",
    "reconnects": "Times that a session was online again.",
    "late_confirmations": "Confirmations that came too late, twice, or over an old link.",
    "events_dropped": "Events that there was no room for.",
    "events_returned": "Messages that nobody had begun: the server sends them again.",
    "handler_failures": "Times that a handler of events raised.",
    "repeated": "Sends that a peer asked for again, and got.",
    "not_repeated": "Sends that a peer asked for again, and that were not kept.",
}
_GAUGES = {
    "sending": "Sends that are under way.",
    "waiting": "Sends that wait for their turn at the link.",
    "events_waiting": "Events that nobody has taken yet.",
}


class SessionsCollector(Collector):
    """Shows sessions to Prometheus, by protocol; they are held weakly."""

    def __init__(self, *sessions: Sessions) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[Sessions] = WeakSet(sessions)

    def add(self, sessions: Sessions) -> None:
        """Show these too."""
        with self._lock:
            self._sessions.add(sessions)

    def remove(self, sessions: Sessions) -> None:
        """Show these no more; harmless if they were not shown."""
        with self._lock:
            self._sessions.discard(sessions)

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values: enough for a registry to find clashes of names."""
        yield from _families(())

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        with self._lock:
            sessions = list(self._sessions)
        yield from _families(sessions)


def _families(sources: Iterable[Sessions]) -> Iterator[Metric]:
    totals: dict[str, Counter[str]] = {}
    states, now = Counter[tuple[str, str]](), dict[str, Counter[str]]()
    for sessions in sources:
        for protocol, counted in sessions.totals().items():
            totals.setdefault(protocol, Counter()).update(counted)
        for session in sessions:
            status = session.status()
            states[status["protocol"], status["state"]] += 1
            gauges = now.setdefault(status["protocol"], Counter())
            gauges.update({name: status[name] for name in _GAUGES})
    gauge = GaugeMetricFamily(
        PREFIX.rstrip("_"), "Sessions, by their state.", labels=("protocol", "state")
    )
    for (protocol, state), number in states.items():
        gauge.add_metric((protocol, state), number)
    yield gauge
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=("protocol",))
        for protocol, numbers in now.items():
            gauge.add_metric((protocol,), numbers[name])
        yield gauge
    sends = CounterMetricFamily(
        f"{PREFIX}sends", "Sends, by what became of them.", labels=("protocol", "outcome")
    )
    for protocol, total in totals.items():
        for outcome in OUTCOMES:
            sends.add_metric((protocol, outcome), total[outcome])
    yield sends
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=("protocol",))
        for protocol, total in totals.items():
            counter.add_metric((protocol,), total[name])
        yield counter
