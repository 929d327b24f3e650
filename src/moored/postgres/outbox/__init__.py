"""The outbox: events published in the caller's own transaction, and consumed without gaps."""

from ._consumer import OutboxConsumer
from ._ddl import ddl, grants
from ._outbox import Batch, Outbox, Upkeep
from ._reader import ConsumerReplaced, OutboxEvent
from ._status import ConsumerLag, HeldBack, OutboxStatus

__all__ = [
    "Batch",
    "ConsumerLag",
    "ConsumerReplaced",
    "HeldBack",
    "Outbox",
    "OutboxConsumer",
    "OutboxEvent",
    "OutboxStatus",
    "Upkeep",
    "ddl",
    "grants",
]
