"""The outbox: events published in the caller's own transaction, and consumed without gaps."""

from ._consumer import OutboxConsumer
from ._ddl import Wake, ddl, grants
from ._outbox import Outbox, OutboxBatch, OutboxUpkeep
from ._pool import OutboxPool
from ._reader import ConsumerReplaced, OutboxEvent
from ._status import ConsumerLag, HeldBack, OutboxStatus

__all__ = [
    "ConsumerLag",
    "ConsumerReplaced",
    "HeldBack",
    "Outbox",
    "OutboxBatch",
    "OutboxConsumer",
    "OutboxEvent",
    "OutboxPool",
    "OutboxStatus",
    "OutboxUpkeep",
    "Wake",
    "ddl",
    "grants",
]
