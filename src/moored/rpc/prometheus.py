"""Prometheus metrics of connection managers, read at each scrape.

::

    collector = RpcCollector(manager)
    prometheus_client.REGISTRY.register(collector)

Calls are not slowed down: all metrics are read from counters that the managers keep anyway. They
are labelled with the configured address, never with a key or a token. The states of the connections
are in `moored.kernel.prometheus.LinksCollector`. It needs prometheus-client,
which `moored[service]` installs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TypeAlias

from moored.kernel.prometheus import Metric, SourceCollector, counter, gauge

from ._counters import Counters
from ._manager import ConnectionManager
from ._manager_async import AsyncConnectionManager

__all__ = ["RpcCollector"]

Source: TypeAlias = AsyncConnectionManager | ConnectionManager

PREFIX = "moored_rpc_"

_COUNTERS = {
    each.name: each.metadata["help"]
    for each in fields(Counters)
    if not each.name.startswith("probes_")
}


class RpcCollector(SourceCollector[Source]):
    """Prometheus metrics of connection managers, summed by address. Managers are held weakly."""

    def families(self, sources: Sequence[Source]) -> Iterator[Metric]:
        """Yield gauges of the connections and counters of the addresses."""
        yield from _gauges(sources)
        totals: dict[str, Counters] = {}
        for manager in sources:
            for address, counters in list(manager._table.counters.items()):
                totals.setdefault(address, Counters()).add(counters)
        for name, text in _COUNTERS.items():
            samples = [((address,), getattr(total, name)) for address, total in totals.items()]
            yield counter(PREFIX + name, text, ("address",), samples)
        yield counter(
            f"{PREFIX}probes",
            "Probes of idle connections before their checkout, by outcome.",
            ("address", "outcome"),
            [
                ((address, outcome), number)
                for address, total in totals.items()
                for outcome, number in (
                    ("healthy", total.probes_healthy),
                    ("unhealthy", total.probes_unhealthy),
                )
            ],
        )


def _gauges(managers: Sequence[Source]) -> Iterator[Metric]:
    clients, waiting, calls = Counter[str](), Counter[str](), Counter[str]()
    for manager in managers:
        for endpoint in manager._table:
            address = endpoint.config.address
            clients[address] += len(endpoint.clients) + endpoint.anonymous
            waiting[address] += endpoint.waiting
            calls[address] += endpoint.handler.calls
    for name, text, numbers in (
        ("clients", "Clients that have a connection.", clients),
        ("waiting", "Callers waiting for a connection.", waiting),
        ("calls", "Calls in flight.", calls),
    ):
        samples = [((address,), number) for address, number in numbers.items()]
        yield gauge(PREFIX + name, text, ("address",), samples)
