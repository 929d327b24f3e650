"""The numbers of connection managers for Prometheus, read when somebody scrapes them.

::

    collector = RpcCollector(manager)
    prometheus_client.REGISTRY.register(collector)

It costs a call nothing: all metrics are made from what the managers count anyway. They bear the
address that was asked for, never a key or a token. It needs prometheus-client, which
`moored[service]` brings.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ._counters import Counters
from ._manager import ConnectionManager
from ._manager_async import AsyncConnectionManager

__all__ = ["RpcCollector"]

Source: TypeAlias = AsyncConnectionManager | ConnectionManager

PREFIX = "moored_rpc_"

_COUNTERS = {
    "connects": "Channels that were connected and used.",
    "connect_failures": "Attempts that brought no channel.",
    "recoveries": "Times that a connection was found broken, and another was made in its place.",
    "renewals": "Channels that were replaced because of their age.",
    "moves": "Times that a connection went to another member of the topology.",
    "topology_fetches": "Times that the topology was asked for, and was told.",
    "topology_fetch_failures": "Times that the topology was asked for, and could not be had.",
    "credential_refreshes": "Times that refused credentials were refreshed.",
    "credential_refresh_failures": "Times that refused credentials could not be refreshed.",
    "stale_errors": "Errors of an old generation, which changed nothing.",
    "calls_waited": "Calls that waited for a connection.",
    "calls_unsent": "Calls that were not sent: there was no connection in their time.",
}


class RpcCollector(Collector):
    """Shows connection managers to Prometheus, by address; those of several are added up.

    They are held weakly: one that nobody uses any more is gone from here as well.
    """

    def __init__(self, *managers: Source) -> None:
        self._lock = threading.Lock()
        self._managers: WeakSet[Source] = WeakSet(managers)

    def add(self, manager: Source) -> None:
        """Show this one too."""
        with self._lock:
            self._managers.add(manager)

    def remove(self, manager: Source) -> None:
        """Show this one no more; harmless if it was not shown."""
        with self._lock:
            self._managers.discard(manager)

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values: enough for a registry to find clashes of names."""
        yield from _families(())

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        with self._lock:
            managers = list(self._managers)
        yield from _families(managers)


def _families(managers: Iterable[Source]) -> Iterator[Metric]:
    yield from _gauges(managers)
    totals: dict[str, Counters] = {}
    for manager in managers:
        for address, counters in manager._book.ledger:
            totals.setdefault(address, Counters()).add(counters)
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=("address",))
        for address, total in totals.items():
            counter.add_metric((address,), getattr(total, name))
        yield counter
    probes = CounterMetricFamily(
        f"{PREFIX}probes",
        "Idle connections that were asked before they were handed out, by outcome.",
        labels=("address", "outcome"),
    )
    for address, total in totals.items():
        probes.add_metric((address, "healthy"), total.probes_healthy)
        probes.add_metric((address, "unhealthy"), total.probes_unhealthy)
    yield probes


def _gauges(managers: Iterable[Source]) -> Iterator[Metric]:
    connections, clients, waiting = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    calls = Counter[str]()
    for manager in managers:
        for managed in manager._book:
            address = managed.config.address
            connections[address, managed.core.machine.phase] += 1
            clients[address] += len(managed.clients) + managed.anonymous
            waiting[address] += managed.core.waiting
            calls[address] += managed.handler.calls
    gauge = GaugeMetricFamily(
        f"{PREFIX}connections", "Connections, by their state.", labels=("address", "state")
    )
    for (address, state), number in connections.items():
        gauge.add_metric((address, state), number)
    yield gauge
    for name, text, numbers in (
        ("clients", "Clients that have a connection.", clients),
        ("waiting", "Callers that wait for a connection.", waiting),
        ("calls", "Calls that are under way.", calls),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=("address",))
        for address, number in numbers.items():
            gauge.add_metric((address,), number)
        yield gauge
