"""Prometheus metrics of brokers, read at each scrape.

::

    prometheus_client.REGISTRY.register(BrokerCollector(broker))

No label names a tenant. Needs prometheus-client, which `moored[service]` installs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moored.kernel.prometheus import Metric, SourceCollector, counter, gauge

from ._broker import Broker

__all__ = ["BrokerCollector"]

PREFIX = "moored_broker_"
_GAUGES = {
    "subscribers": "Open streams.",
    "tenants": "Tenants with at least one open stream.",
    "buffer_high_water": "The most events that a subscriber's buffer has held.",
}
_COUNTERS = {
    "events": "Events read from the source.",
    "delivered": "Events written to the buffer of a subscriber.",
    "replayed": "Events read from the history for a subscriber that resumed.",
}
_BY_REASON = {
    "dropped": "Events and deliveries that were dropped, by reason.",
    "resets": "Resets that subscribers got, by reason.",
    "refused": "Streams that were refused, by the limit, or by what is wrong with the token.",
}


class BrokerCollector(SourceCollector[Broker]):
    """Prometheus metrics of brokers, which are held weakly."""

    def families(self, sources: Sequence[Broker]) -> Iterator[Metric]:
        """Yield the metrics of all brokers."""
        found = [(broker, broker.statistics()._asdict()) for broker in sources]
        up = [((broker.name,), float(broker.up)) for broker in sources]
        yield gauge(PREFIX + "up", "1 while the source yields events, else 0.", ("broker",), up)
        for name, text in _GAUGES.items():
            samples = [((broker.name,), counts[name]) for broker, counts in found]
            yield gauge(PREFIX + name, text, ("broker",), samples)
        for name, text in _COUNTERS.items():
            samples = [((broker.name,), counts[name]) for broker, counts in found]
            yield counter(PREFIX + name, text, ("broker",), samples)
        for name, text in _BY_REASON.items():
            by_reason = [
                ((broker.name, reason), number)
                for broker, counts in found
                for reason, number in counts[name].items()
            ]
            yield counter(PREFIX + name, text, ("broker", "reason"), by_reason)
