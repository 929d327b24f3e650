"""Postgres connections that are kept alive: replication, pools, lock, timeline and health."""

from ._changes import Change, Delete, Emitted, Insert, Truncate, Update
from ._consumer import Changes, Reset, Transaction
from ._errors import ConfigurationError, PostgresError, ProtocolError, StreamEnded
from ._health import Connection, Health, Persistent, Status
from ._lsn import Lsn
from ._position import History, Position
from ._postgres import Postgres, StackEvent
from ._rows import UNCHANGED, Column, Relation, ReplicaIdentity, Row

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # What users call
    "Changes",
    "History",
    "Position",
    "Postgres",
    "Reset",
    "StackEvent",
    "Transaction",
    # How it is
    "Connection",
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
    "PostgresError",
    "ProtocolError",
    "StreamEnded",
]
