"""Prometheus metrics of listeners, read from their reports at each scrape::

    prometheus_client.REGISTRY.register(ListenerCollector(listener))

The states of their connections are in `moored.kernel.prometheus.LinksCollector`. This module needs
prometheus-client, which `moored[service]` installs. An unknown value (nothing was measured yet) is
left out rather than reported as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moored.kernel.prometheus import Metric, Samples, SourceCollector, counter, gauge

from ._listener import Listener

__all__ = ["ListenerCollector"]

PREFIX = "moored_postgres_listener_"
LABEL = "listener"

#: Name, help, and the name in the report.
GAUGES = (
    ("up", "1 while the listener is connected and listens to all its channels.", "up"),
    ("generation", "The number of the current or last connection attempt.", "generation"),
    ("heartbeat_age_seconds", "Seconds since the last answered heartbeat.", "heartbeat_age"),
    ("heartbeat_seconds", "Duration of the last answered heartbeat.", "heartbeat_latency"),
    ("canary_seconds", "Seconds until the last test notification arrived.", "canary_latency"),
    ("queue_usage", "Share of the server's notification queue that is in use.", "queue_usage"),
    ("down_seconds", "Seconds since the connection was lost; absent while it is up.", "down_for"),
    ("subscriptions", "Subscriptions.", "subscriptions"),
)
COUNTERS = (
    ("reconnects", "Connections that replaced a lost one.", "reconnects"),
    ("failures", "Connection attempts that failed.", "failures"),
    ("failed_series", "Series of five connection attempts that failed.", "failed_series"),
    ("canaries_lost", "Test notifications that were sent and did not arrive.", "canaries_lost"),
    ("delivered", "Notifications delivered to subscriptions.", "delivered"),
    ("dropped", "Notifications dropped because a subscription was full.", "dropped"),
    ("gaps", "Gaps reported to subscriptions after a lost connection.", "gaps"),
)


class ListenerCollector(SourceCollector[Listener]):
    """Prometheus metrics of listeners, by name; a listener that is not open has none."""

    def families(self, sources: Sequence[Listener]) -> Iterator[Metric]:
        """Yield everything that `statistics()` reports as a number."""
        reports = [listener.statistics() for listener in sources if listener.is_open]
        for kind, table in ((gauge, GAUGES), (counter, COUNTERS)):
            for name, text, key in table:
                yield kind(PREFIX + name, text, (LABEL,), _samples(reports, key))


def _samples(reports: list[dict[str, Any]], key: str) -> Samples:
    return [((now["name"],), float(now[key])) for now in reports if now[key] is not None]
