"""Positions in the total order of an outbox, and whether a server can continue from one.

The order is (xid, id): the transaction ID of the publisher, with its epoch, and the number of the
event. A transaction is read once no older one is running, so commits out of order are not skipped.
Without a table, the LSN of the end of the commit is in the place of the transaction ID, and the
number of the event counts within its transaction.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from .._position import History


class Cursor(NamedTuple):
    """A position: everything up to and including (xid, id) was read. Its `str()` is opaque."""

    history: History
    xid: int
    #: 0 for a position before the first event of the transaction `xid`.
    id: int = 0
    #: The event's time of insertion in microseconds, by which it is recognized; 0 if `id` is 0.
    mark: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a cursor that `str()` has written."""
        try:
            system_id, *numbers = text.split("-")
            timeline, xid, id_, mark = map(int, numbers)
            return cls(History(system_id, timeline), xid, id_, mark)
        except ValueError:
            raise ValueError(f"{text[:100]!r} is not a cursor of an outbox") from None

    def __str__(self) -> str:
        return "-".join(map(str, (*self.history, self.xid, self.id, self.mark)))

    @property
    def place(self) -> tuple[int, int]:
        """What the order is by."""
        return self.xid, self.id


class OutboxState(NamedTuple):
    """The state of the outbox at a server, at the time of a read."""

    history: History
    #: Transactions before this one have ended.
    xmin: int
    #: Transactions from this one on have not begun.
    xmax: int
    #: Everything up to here was dropped by the retention.
    floor: tuple[int, int]
    #: Whether the event at the cursor exists.
    found: bool
    #: Whether events are committed that wait for the end of a transaction that began earlier.
    held: bool

    def oldest(self) -> Cursor:
        """Return the position before the oldest event."""
        return Cursor(self.history, *self.floor)

    def now(self) -> Cursor:
        """Return the position after every event that can be read now."""
        return Cursor(self.history, self.xmin)

    def refuses(self, cursor: Cursor) -> str | None:
        """Return why events may be missing after this cursor; None if none is."""
        if (other := cursor.history.difference(self.history)) is not None:
            return other
        if cursor.place < self.floor:
            return "events after the cursor were dropped by the retention"
        if cursor.xid > self.xmax:
            return (
                f"the cursor's position {cursor.xid} has not been reached here (the next is "
                f"{self.xmax}): a copy of the database's disk was restored"
            )
        if cursor.mark and not self.found and cursor.place != self.floor:
            return "the cursor's event does not exist: a copy of the database's disk was restored"
        return None
