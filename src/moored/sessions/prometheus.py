"""Prometheus metrics of sessions, read at each scrape.

::

    prometheus_client.REGISTRY.register(SessionsCollector(sessions))

They are summed over all accounts of a protocol: no label names a profile or a recipient. The states
of the sessions are in `moored.kernel.prometheus.LinksCollector`. Needs prometheus-client, which
`moored[service]` installs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moored.kernel.prometheus import Metric, SourceCollector, counter, gauge

from ._sessions import Sessions

__all__ = ["SessionsCollector"]

PREFIX = "moored_sessions_"
OUTCOMES = ("acked", "rejected", "not_sent", "unknown")

_COUNTERS = {
    "received": "Frames received and interpreted by the protocol.",
    "unhandled": "Frames received that the protocol does not handle.",
    "stale": "Reads from a link that was already replaced, which were dropped.",
    "bounced": "Sends that the server confirmed and could not deliver later.",
    "crashes": "Connections that crashed and were started again.",
    "sender_crashes": "Crashed steps of sends, each of which fails all sends to a recipient.",
    "reconnects": "Reconnects: times that a session came online again.",
    "late_confirmations": "Confirmations dropped: late, duplicate, or from an old link.",
    "events_dropped": "Events dropped because the event queue was full.",
    "events_returned": "Queued messages dropped because the server sends them again.",
    "handler_failures": "Exceptions raised by event handlers.",
    "messages_set_aside": "Messages not acknowledged because handling them failed.",
    "repeated": "Sends written again at a peer's request.",
    "not_repeated": "Requests for an old send that was no longer kept.",
}
_GAUGES = {
    "sending": "Sends without an outcome yet.",
    "waiting": "Sends waiting for a link or for the send window.",
    "events_waiting": "Events waiting in the queue for a consumer.",
}


class SessionsCollector(SourceCollector[Sessions]):
    """Prometheus metrics of sessions, summed by protocol. `Sessions` objects are held weakly."""

    def families(self, sources: Sequence[Sessions]) -> Iterator[Metric]:
        """Yield gauges of the open sessions and counters of all."""
        totals: dict[str, Counter[str]] = {}
        now: dict[str, Counter[str]] = {}
        for sessions in sources:
            for protocol, counted in sessions.totals().items():
                totals.setdefault(protocol, Counter()).update(counted)
            for session in sessions:
                status = session.status()
                gauges = now.setdefault(status["protocol"], Counter())
                gauges.update({name: status[name] for name in _GAUGES})
        for name, text in _GAUGES.items():
            samples = [((protocol,), numbers[name]) for protocol, numbers in now.items()]
            yield gauge(PREFIX + name, text, ("protocol",), samples)
        yield counter(
            f"{PREFIX}sends",
            "Sends, by outcome.",
            ("protocol", "outcome"),
            [
                ((protocol, outcome), total[outcome])
                for protocol, total in totals.items()
                for outcome in OUTCOMES
            ],
        )
        for name, text in _COUNTERS.items():
            samples = [((protocol,), total[name]) for protocol, total in totals.items()]
            yield counter(PREFIX + name, text, ("protocol",), samples)
