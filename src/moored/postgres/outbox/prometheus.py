"""Prometheus metrics of outboxes; importing it requires prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moored.kernel.prometheus import Metric, SourceCollector, gauge

from ._outbox import Outbox
from ._status import OutboxStatus

__all__ = ["OutboxCollector"]


class OutboxCollector(SourceCollector[Outbox]):
    """Prometheus metrics of outboxes, by schema, as of the last query of their state."""

    def families(self, sources: Sequence[Outbox]) -> Iterator[Metric]:
        """Yield the size, the age, what holds delivery back, and the lags of the consumers."""
        known = [(outbox, outbox.last_status) for outbox in sources if outbox.last_status]
        for name, text, value in _GAUGES:
            samples = [((outbox.schema,), value(status)) for outbox, status in known]
            yield gauge(f"moored_outbox_{name}", text, ("schema",), samples)
        culprits = [
            (outbox.schema, status.held_back, status.held_back.age or 0.0)
            for outbox, status in known
            if status.held_back is not None
        ]
        yield gauge(
            "moored_outbox_held_back_transaction_seconds",
            "Age of the transaction that events wait for; absent if they wait for none.",
            ("schema", "pid", "application", "prepared", "query"),
            [
                ((schema, str(each.pid or ""), each.application, each.gid or "", each.query), age)
                for schema, each, age in culprits
            ],
        )
        yield gauge(
            "moored_outbox_listener_up",
            "1 while notifications wake the consumers, 0 while they read every second.",
            ("schema",),
            [((outbox.schema,), float(outbox.wakes.up)) for outbox in sources if outbox.is_open],
        )
        yield gauge(
            "moored_outbox_unanswered_seconds",
            "Seconds without an answer to a statement, or to the pool; 0 if nothing waits.",
            ("schema",),
            [((each.schema,), each.statistics()["unanswered"]) for each in sources if each.is_open],
        )
        yield gauge(
            "moored_outbox_consumer_lag_seconds",
            "Age of the oldest event after a consumer's cursor.",
            ("schema", "consumer"),
            [
                ((outbox.schema, each.name), each.lag)
                for outbox, status in known
                for each in status.consumers
            ],
        )


_GAUGES: tuple[tuple[str, str, Callable[[OutboxStatus], float]], ...] = (
    ("bytes", "Bytes of all partitions with their indexes.", lambda now: now.bytes),
    ("partitions", "Partitions.", lambda now: now.partitions),
    ("oldest_seconds", "Age of the oldest stored event.", lambda now: now.oldest or 0.0),
    (
        "held_back_seconds",
        "Time for which events have waited for the end of a transaction.",
        lambda now: now.held_back.waiting if now.held_back else 0.0,
    ),
)
