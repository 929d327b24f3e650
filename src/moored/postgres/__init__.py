"""Supervised Postgres connections: logical replication, pools, one owner by a lock, and health."""

from ._errors import ConfigurationError, DecodeError, PostgresError, StateError, StreamEnded
from ._lsn import Lsn
from ._position import RESUME, History, Position
from ._postgres import Postgres, StackEvent
from .consume import Changes, Reset, SchemaChanged, Transaction
from .decode import (
    UNCHANGED,
    Change,
    Column,
    Delete,
    Emitted,
    Insert,
    Relation,
    ReplicaIdentity,
    Row,
    Truncate,
    Update,
)
from .doctor import Connected, Examination, Finding, Severity, examine
from .listen import Gap, Listener, Notification, NotifyRefused, PoolerRefused, Subscription
from .outbox import (
    ConsumerLag,
    ConsumerReplaced,
    HeldBack,
    Outbox,
    OutboxBatch,
    OutboxConsumer,
    OutboxEvent,
    OutboxStatus,
    OutboxUpkeep,
)
from .parking import ParkedItem, Parking
from .report import ConnectionState, Health, Persistent, Status
from .snapshot import CopyPosition, CopyProgress, Follow, Rows, Snapshot

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # The connection manager and its consumers
    "Changes",
    "History",
    "Position",
    "Postgres",
    "RESUME",
    "Reset",
    "SchemaChanged",
    "StackEvent",
    "Transaction",
    # Copies of tables
    "CopyPosition",
    "CopyProgress",
    "Follow",
    "Rows",
    "Snapshot",
    # The outbox
    "ConsumerLag",
    "HeldBack",
    "Outbox",
    "OutboxBatch",
    "OutboxConsumer",
    "OutboxEvent",
    "OutboxStatus",
    "OutboxUpkeep",
    # Parked items
    "ParkedItem",
    "Parking",
    # The doctor
    "Connected",
    "Examination",
    "Finding",
    "Severity",
    "examine",
    # The listener
    "Gap",
    "Listener",
    "Notification",
    "Subscription",
    # State
    "ConnectionState",
    "Health",
    "Persistent",
    "Status",
    # Changes
    "Change",
    "Column",
    "Delete",
    "Emitted",
    "Insert",
    "Lsn",
    "Relation",
    "ReplicaIdentity",
    "Row",
    "Truncate",
    "UNCHANGED",
    "Update",
    # Errors
    "ConfigurationError",
    "ConsumerReplaced",
    "PostgresError",
    "DecodeError",
    "NotifyRefused",
    "PoolerRefused",
    "StateError",
    "StreamEnded",
]
