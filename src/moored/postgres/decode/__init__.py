"""Decoding: from the bytes of pgoutput to committed transactions, changes and Python values."""

from ._assembler import SCHEMA_SIGNAL, Assembler
from ._body import HEADER, Body, Shelf
from ._changes import Change, Delete, Emitted, Insert, Truncate, Update, read_change
from ._rows import UNCHANGED, Column, Relation, ReplicaIdentity, Row
from ._transaction import Committed
from ._types import OwnType, Types
from ._wire import KEEPALIVE, PrimaryKeepalive, read_keepalive, status_update

__all__ = [
    "HEADER",
    "KEEPALIVE",
    "SCHEMA_SIGNAL",
    "UNCHANGED",
    "Assembler",
    "Body",
    "Change",
    "Column",
    "Committed",
    "Delete",
    "Emitted",
    "Insert",
    "OwnType",
    "PrimaryKeepalive",
    "Relation",
    "ReplicaIdentity",
    "Row",
    "Shelf",
    "Truncate",
    "Types",
    "Update",
    "read_change",
    "read_keepalive",
    "status_update",
]
