"""Where a copy and its stream continue, and how fast a copy is."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Self

from .._position import Position
from ._join import CopyState

__all__ = ["COMPLETE", "CopyPosition", "CopyProgress", "CopyVersion"]


class CopyVersion(NamedTuple):
    """What a copy was made of: it can only be continued with the same."""

    #: The table, the condition and the chosen columns.
    source: str = ""
    #: The columns of the table as they were: another one after an ALTER TABLE.
    columns: str = ""
    #: The table's entry in the publication; empty if its changes were not published.
    published: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a version that `str()` has written."""
        return cls(*text.split("."))

    def __str__(self) -> str:
        return ".".join(self)


class CopyPosition(NamedTuple):
    """Where a copy and the stream of its changes continue; its `str()` fits into any text column.

    Store it in the same transaction as the effect of an item, and pass it as `start=` later.
    """

    position: Position
    state: CopyState
    version: CopyVersion

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a position that `str()` has written, or one of `changes()`."""
        position, _, copy = text.partition(" ")
        try:
            # A position of `changes()` does not tell what was copied.
            found: list[Any] = json.loads(copy) if copy else ["", *COMPLETE]
            state, version = CopyState.load(found[1:]), CopyVersion.parse(found[0])
            return cls(Position.parse(position), state, version)
        except (ValueError, TypeError, IndexError, AttributeError):
            raise ValueError(f"{text!r} is not a position: store str(item.position)") from None

    def __str__(self) -> str:
        chunks = self.state.forget(self.position.lsn).dump()
        return f"{self.position} {json.dumps([str(self.version), *chunks], separators=(',', ':'))}"


#: The state of a complete copy whose snapshots the stream has passed.
COMPLETE = [[None, "0:0:", "0/0"]]


class CopyProgress(NamedTuple):
    """How much of a table is copied, and how fast."""

    rows: int
    #: The number of rows in the table, by the server's statistics; 0 if it has none.
    estimated: int
    #: Seconds since the copy began, or was continued.
    seconds: float
    complete: bool = False

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at this rate, if the estimate is right; None if unknown."""
        if self.complete:
            return 0.0
        if not self.rows or not self.estimated:
            return None
        return max(self.estimated - self.rows, 0) / self.rate

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as plain data for JSON."""
        return {**self._asdict(), "rate": self.rate, "seconds_left": self.seconds_left}

    def __str__(self) -> str:
        total = f" of about {max(self.estimated, self.rows):,}" if not self.complete else ""
        left = self.seconds_left
        rest = f", {left:.0f} s left" if left and not self.complete else ""
        return f"{self.rows:,}{total} rows in {self.seconds:.1f} s ({self.rate:,.0f}/s{rest})"
