"""Prometheus metrics of streams, read from their reports at each scrape::

    collector = PostgresCollector(pg)
    prometheus_client.REGISTRY.register(collector)

All metrics are taken from `statistics()`, so they cost the stream nothing. This module needs
prometheus-client, which `moored[service]` installs. An unknown value (no connection, not queried
yet) is left out rather than reported as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moored.kernel.prometheus import Metric, Samples, SourceCollector, counter, gauge

from ._lsn import Lsn
from ._postgres import Postgres
from .report import Health

__all__ = ["PostgresCollector"]

PREFIX = "moored_postgres_"
LABEL = "stream"

Report = Mapping[str, Any]


def _at(*path: str) -> Callable[[Report], Samples]:
    """Sample the value at a path of the report; nothing if it is unknown."""

    def samples(now: Report) -> Samples:
        value: Any = now
        for name in path:
            value = value and value[name]
        if value is not None:
            yield (), _number(value)

    return samples


def _each(part: str, name: str | None = None) -> Callable[[Report], Samples]:
    """Sample each entry of a part of the report: its value, or the value of this name in it."""

    def samples(now: Report) -> Samples:
        for key, each in now[part].items():
            value = each if name is None else each[name]
            if value is not None:
                yield (key,), _number(value)

    return samples


def _number(value: Any) -> float:
    """Return a number: an LSN as its position in bytes, a list as its length."""
    if isinstance(value, list):
        return float(len(value))
    return float(Lsn.parse(value) if isinstance(value, str) else value)


def _healths(now: Report) -> Samples:
    for health in Health:
        yield (health.value,), float(now["health"] == health.value)


def _steps(now: Report) -> Samples:
    yield (now["phase"], now["step"]), now["for"]


_POOL, _CONSUMER = ("pool",), ("consumer",)

#: Name, help, further labels, and the function that samples a report.
GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[Report], Samples]], ...] = (
    ("health", "1 for the current health, 0 for the others.", ("health",), _healths),
    ("condition_met", "1 while a condition is met.", ("name",), _each("conditions", "met")),
    ("step_seconds", "Seconds since the current step began.", ("phase", "step"), _steps),
    ("lag_bytes", "Bytes of WAL not acknowledged by every consumer.", (), _at("lag", "bytes")),
    ("lag_seconds", "Age of the oldest unacknowledged transaction.", (), _at("lag", "seconds")),
    ("retained_wal_bytes", "Bytes of WAL kept for the slot.", (), _at("slot", "retained")),
    ("received_lsn", "LSN up to which WAL was received.", (), _at("received")),
    ("flushed_lsn", "LSN before which everything is acknowledged.", (), _at("flushed")),
    ("last_seen_lsn", "LSN of the end of the last received transaction.", (), _at("last_seen")),
    (
        "silent_seconds",
        "Seconds without a reply on the stream; 0 if none is due.",
        (),
        _at("silent"),
    ),
    ("lock_held", "1 while this instance holds the lock.", (), _at("lock", "held")),
    ("slot_blockers", "Transactions that a new slot waits for.", (), _at("slot_blockers")),
    ("pool_connections", "Open connections of a pool.", _POOL, _each("pools", "connected")),
    ("pool_max_size", "Connections that a pool should have.", _POOL, _each("pools", "max_size")),
    ("pool_in_use", "Connections that are checked out.", _POOL, _each("pools", "in_use")),
    (
        "pool_silent_seconds",
        "Seconds for which the server has not answered a pool; 0 if it answers.",
        _POOL,
        _each("pools", "silent"),
    ),
    ("pool_waiting", "Callers that wait for a connection.", _POOL, _each("pools", "waiting")),
    (
        "consumer_attached",
        "1 while the consumer is attached.",
        _CONSUMER,
        _each("consumers", "attached"),
    ),
    (
        "consumer_outstanding",
        "Transactions that a consumer was given and has not acknowledged.",
        _CONSUMER,
        _each("consumers", "outstanding"),
    ),
    (
        "consumer_acknowledged_lsn",
        "LSN up to which a consumer has acknowledged everything.",
        _CONSUMER,
        _each("consumers", "acknowledged"),
    ),
)
COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[Report], Samples]], ...] = (
    ("transactions", "Transactions received.", (), _at("transactions")),
    ("bytes", "Bytes of transactions received.", (), _at("bytes")),
    ("connects", "Replication connections opened.", (), _at("connects")),
    ("restarts", "Restarts of the connection subsystem.", (), _at("restarts")),
    ("events", "Events, by name.", ("event",), _each("event_counts")),
)


class PostgresCollector(SourceCollector[Postgres]):
    """Prometheus metrics of streams, by `stream_id`; a stream that is not open has none."""

    def add(self, source: Postgres) -> None:
        """Include the metrics of this stream, in place of another with the same `stream_id`."""
        stream_id = source.settings.stream_id
        with self._lock:
            others = [one for one in self._sources if one.settings.stream_id == stream_id]
            self._sources.difference_update(others)
            self._sources.add(source)

    def families(self, sources: Sequence[Postgres]) -> Iterator[Metric]:
        """Yield everything that `statistics()` reports."""
        reports = {pg.settings.stream_id: _read(pg) for pg in sources if pg.is_open}
        for kind, table in ((gauge, GAUGES), (counter, COUNTERS)):
            for name, text, labels, samples in table:
                found = [
                    ((stream, *values), value)
                    for stream, now in reports.items()
                    for values, value in samples(now)
                ]
                yield kind(PREFIX + name, text, (LABEL, *labels), found)


def _read(pg: Postgres) -> Report:
    """Return a report; safe to call from another thread than the stream's event loop."""
    for _ in range(10):
        try:
            return pg.statistics()
        except RuntimeError:
            pass  # a dict has changed during its iteration
    return pg.statistics()
