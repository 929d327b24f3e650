"""The consumers: their acknowledgements, their tables, and their stored state."""

from ._consumer import Attachment, Changes, Reset, Transaction
from ._hub import Hub
from ._integrity import Integrity
from ._publisher import Publisher
from ._schema_changes import SchemaChanged
from ._store import StateStore, StoredState, stored
from ._tables import mistakes, shortened

__all__ = [
    "Attachment",
    "Changes",
    "Hub",
    "Integrity",
    "Publisher",
    "Reset",
    "SchemaChanged",
    "StateStore",
    "StoredState",
    "Transaction",
    "mistakes",
    "shortened",
    "stored",
]
