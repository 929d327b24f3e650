"""Metrics of streams for Prometheus, from their reports, when somebody scrapes::

    collector = PostgresCollector(pg)
    prometheus_client.REGISTRY.register(collector)

Everything is made from `statistics()`, so it costs the stream nothing. It needs prometheus-client,
which `moored[service]` brings. What is not known (no connection, not looked at yet) is left out
rather than told as 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ._health import Health
from ._lsn import Lsn
from ._postgres import Postgres

__all__ = ["PostgresCollector"]

PREFIX = "moored_postgres_"
LABEL = "stream"

Report = Mapping[str, Any]
#: For a metric: the values of its labels, and its own.
Samples = Iterator[tuple[tuple[str, ...], float]]


def _one(value: float | None) -> Samples:
    if value is not None:
        yield (), float(value)


def _place(text: str | None) -> Samples:
    yield from _one(None if text is None else Lsn.parse(text))


def _healths(now: Report) -> Samples:
    for health in Health:
        yield (health.value,), float(now["health"] == health.value)


def _conditions(now: Report) -> Samples:
    for name, condition in now["conditions"].items():
        yield (name,), float(condition["met"])


def _steps(now: Report) -> Samples:
    yield (now["phase"], now["step"]), now["for"]


def _of_pools(name: str) -> Callable[[Report], Samples]:
    def samples(now: Report) -> Samples:
        for role, pool in now["pools"].items():
            yield (role,), float(pool[name])

    return samples


def _of_consumers(name: str) -> Callable[[Report], Samples]:
    def samples(now: Report) -> Samples:
        for consumer, each in now["consumers"].items():
            yield (consumer,), float(each[name])

    return samples


def _acknowledged(now: Report) -> Samples:
    for consumer, each in now["consumers"].items():
        if each["acknowledged"] is not None:
            yield (consumer,), float(Lsn.parse(each["acknowledged"]))


def _events(now: Report) -> Samples:
    for name, count in now["event_counts"].items():
        yield (name,), float(count)


#: Name, text, further labels, and where the values are.
GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[Report], Samples]], ...] = (
    ("health", "1 for the word that says how it is.", ("health",), _healths),
    ("condition_met", "1 while a condition is met.", ("name",), _conditions),
    ("step_seconds", "Seconds that it has been at its step.", ("phase", "step"), _steps),
    (
        "lag_bytes",
        "Bytes of log that are not acknowledged by everybody.",
        (),
        lambda now: _one(now["lag"] and now["lag"]["bytes"]),
    ),
    (
        "lag_seconds",
        "Seconds that the oldest transaction has been waiting to be acknowledged.",
        (),
        lambda now: _one(now["lag"] and now["lag"]["seconds"]),
    ),
    (
        "retained_wal_bytes",
        "Bytes of log that the server keeps for the slot.",
        (),
        lambda now: _one(now["slot"]["retained"]),
    ),
    ("received_lsn", "How far the log was received.", (), lambda now: _place(now["received"])),
    ("flushed_lsn", "Before this place all is safe.", (), lambda now: _place(now["flushed"])),
    (
        "last_seen_lsn",
        "The end of the last transaction that was received.",
        (),
        lambda now: _place(now["last_seen"]),
    ),
    (
        "lock_held",
        "1 while this instance is the one that streams.",
        (),
        lambda now: _one(now["lock"]["held"]),
    ),
    (
        "slot_blockers",
        "Transactions that a new slot waits for.",
        (),
        lambda now: _one(len(now["slot_blockers"])),
    ),
    ("pool_connections", "Connections of a pool.", ("pool",), _of_pools("connected")),
    ("pool_max_size", "Connections that it should have.", ("pool",), _of_pools("max_size")),
    ("pool_in_use", "Connections that somebody uses.", ("pool",), _of_pools("in_use")),
    ("pool_waiting", "Callers that wait for one.", ("pool",), _of_pools("waiting")),
    ("consumer_attached", "1 while it is here.", ("consumer",), _of_consumers("attached")),
    (
        "consumer_outstanding",
        "Transactions that it was given and has not acknowledged.",
        ("consumer",),
        _of_consumers("outstanding"),
    ),
    (
        "consumer_acknowledged_lsn",
        "Everything up to here it has acknowledged.",
        ("consumer",),
        _acknowledged,
    ),
)
COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[Report], Samples]], ...] = (
    (
        "transactions",
        "Transactions received.",
        (),
        lambda now: _one(now["transactions"]),
    ),
    ("bytes", "Bytes of transactions received.", (), lambda now: _one(now["bytes"])),
    (
        "connects",
        "Replication connections that were made.",
        (),
        lambda now: _one(now["connects"]),
    ),
    (
        "restarts",
        "Times that the connection subsystem began again.",
        (),
        lambda now: _one(now["restarts"]),
    ),
    ("events", "Events told, by name.", ("event",), _events),
)


class PostgresCollector(Collector):
    """Shows streams to Prometheus, each under its id; one that is not open has nothing to show."""

    def __init__(self, *streams: Postgres) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, Postgres] = {}
        for pg in streams:
            self.add(pg)

    def add(self, pg: Postgres) -> None:
        """Show this one too; in place of another with the same id."""
        with self._lock:
            self._streams[pg.settings.stream_id] = pg

    def remove(self, pg: Postgres) -> None:
        """Show this one no more; harmless if it was not shown."""
        with self._lock:
            if self._streams.get(pg.settings.stream_id) is pg:
                del self._streams[pg.settings.stream_id]

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values: enough for a registry to find clashes of names."""
        yield from _families({})

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        with self._lock:
            streams = [pg for pg in self._streams.values() if pg.is_open]
        yield from _families({pg.settings.stream_id: _read(pg) for pg in streams})


def _read(pg: Postgres) -> Report:
    """A report, also from the thread of another server than the stream's own loop."""
    for _ in range(10):
        try:
            return pg.statistics()
        except RuntimeError:
            pass  # something came or went while it was counted
    return pg.statistics()


def _families(reports: Mapping[str, Report]) -> Iterator[Metric]:
    for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, text, labels, samples in table:
            family = kind(PREFIX + name, text, labels=(LABEL, *labels))
            for stream, now in reports.items():
                for values, value in samples(now):
                    family.add_metric((stream, *values), value)
            yield family
