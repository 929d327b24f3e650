"""The outbox: events published in the caller's own transaction, and consumed without gaps."""

from ._consumer import OutboxConsumer
from ._cursor import Cursor
from ._ddl import Wake, ddl, grants, removal
from ._outbox import Outbox, OutboxBatch, OutboxUpkeep
from ._pool import OutboxPool
from ._reader import ConsumerReplaced, OutboxEvent, PsycopgPool
from ._status import ConsumerLag, HeldBack, OutboxStatus

__all__ = [
    "ConsumerLag",
    "ConsumerReplaced",
    "Cursor",
    "HeldBack",
    "Outbox",
    "OutboxBatch",
    "OutboxConsumer",
    "OutboxEvent",
    "OutboxPool",
    "OutboxStatus",
    "OutboxUpkeep",
    "PsycopgPool",
    "Wake",
    "ddl",
    "grants",
    "removal",
]
