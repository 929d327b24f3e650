"""Copies of tables, in chunks, and the stream of changes that continues them."""

from ._delivery import Rows
from ._follow import Follow, SavedCopies
from ._position import CopyPosition, CopyProgress
from ._reader import TableReader
from ._snapshot import CopyMeter, Snapshot

__all__ = [
    "CopyMeter",
    "CopyPosition",
    "CopyProgress",
    "Follow",
    "Rows",
    "SavedCopies",
    "Snapshot",
    "TableReader",
]
