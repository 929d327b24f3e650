"""Copies of tables, in chunks, and the stream of changes that continues them."""

from ._copies import Copies
from ._delivery import Rows
from ._follow import Follow
from ._position import CopyPosition, CopyProgress
from ._reader import TableReader
from ._snapshot import CopyMeter, Snapshot

__all__ = [
    "Copies",
    "CopyMeter",
    "CopyPosition",
    "CopyProgress",
    "Follow",
    "Rows",
    "Snapshot",
    "TableReader",
]
