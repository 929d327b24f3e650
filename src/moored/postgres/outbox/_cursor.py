"""Positions in the total order of an outbox, and whether a server can continue from one.

The order is that of the ids, of which only the final ones are read: see `_barrier`. Without a
table, the LSN of the end of the commit and the number of the event within its transaction are the
id.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from .._position import History

#: The id in a cursor of an outbox before version 3, whose order was that of the transaction IDs.
_OTHER_ORDER = -1
#: A cursor that was made up must not overflow a stream id of Redis.
_LARGEST = 2**128


class Cursor(NamedTuple):
    """A position: everything up to and including `id` was read. Its `str()` is opaque."""

    history: History
    #: The order is by it.
    id: int
    #: The event's time of insertion in microseconds, by which it is recognized; 0 if it is unknown.
    mark: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a cursor that `str()` has written."""
        try:
            system_id, *numbers = text.split("-")
            timeline, *rest = map(int, numbers)
            # Before version 3 there was a transaction ID as well.
            id_, mark = (_OTHER_ORDER, 0) if len(rest) == 3 else rest
            if id_ >= _LARGEST:
                raise ValueError
            return cls(History(system_id, timeline), id_, mark)
        except ValueError:
            raise ValueError(f"{text[:100]!r} is not a cursor of an outbox") from None

    def __str__(self) -> str:
        place = (0, 0, 0) if self.id == _OTHER_ORDER else (self.id, self.mark)
        return "-".join(map(str, (*self.history, *place)))


class OutboxState(NamedTuple):
    """The state of the outbox at a server, at the time of a read."""

    history: History
    #: No event with an id up to this one is still to come.
    final: int
    #: The highest id of an event that is committed.
    highest: int
    #: Everything up to here was dropped by the retention.
    floor: int
    #: Whether the event at the cursor exists.
    found: bool = True
    #: The mark of the event at `final`; 0 if it does not exist.
    mark: int = 0
    #: The snapshot in which the highest id was queried, as of pg_current_snapshot().
    snapshot: str = ""

    @property
    def held(self) -> bool:
        """Whether events are committed that wait for the end of a transaction that publishes."""
        return self.final < self.highest

    def oldest(self) -> Cursor:
        """Return the position before the oldest event."""
        return Cursor(self.history, self.floor)

    def now(self) -> Cursor:
        """Return the position after every event that can be read now."""
        if self.final < self.floor:
            return self.oldest()
        return Cursor(self.history, self.final, self.mark)

    def after(self, cursor: Cursor) -> Cursor:
        """Return the position of a reader that has read everything after a cursor."""
        return max(cursor, self.now(), key=lambda each: each.id)

    def refuses(self, cursor: Cursor) -> str | None:
        """Return why events may be missing after this cursor; None if none is."""
        if (other := cursor.history.difference(self.history)) is not None:
            return other
        if cursor.id == _OTHER_ORDER:
            return (
                "the cursor is of an older version of the outbox, whose order was another one: only"
                " the cursors in the database are converted"
            )
        if cursor.id < self.floor:
            return "events after the cursor were dropped by the retention"
        if cursor.id > max(self.highest, self.floor):
            return (
                f"the cursor's position {cursor.id} has not been reached here (the highest is "
                f"{self.highest}): a copy of the database's disk was restored"
            )
        if cursor.mark and not self.found and cursor.id != self.floor:
            return "the cursor's event does not exist: a copy of the database's disk was restored"
        return None


def sees(snapshot: str, xid: int) -> bool:
    """Return whether a transaction, given without its epoch, had ended before a snapshot."""
    _, end, running = snapshot.split(":")
    if (xid - int(end)) % 2**32 < 2**31:
        return False
    return xid not in {int(each) % 2**32 for each in running.split(",") if each}
