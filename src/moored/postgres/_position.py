"""A position in the history of one database, which a user can store."""

from __future__ import annotations

from enum import Enum
from typing import Final, LiteralString, NamedTuple, Self

from ._lsn import Lsn

__all__ = [
    "HISTORY",
    "RESUME",
    "History",
    "Position",
    "Resume",
    "before_the_slot",
    "beyond_the_end",
    "of_another_history",
]


class Resume(Enum):
    """The `start=` of a consumer that stores no position: that of the state file."""

    RESUME = "resume"

    def __repr__(self) -> str:
        return "RESUME"


RESUME: Final = Resume.RESUME

#: The query for the history of a primary server.
HISTORY: LiteralString = """
    select (select system_identifier::text from pg_control_system()) as system_id,
        ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int as timeline"""


class History(NamedTuple):
    """A database (its system identifier) and one of its timelines."""

    system_id: str
    timeline_id: int

    def __str__(self) -> str:
        return f"{self.system_id}/{self.timeline_id}"

    def difference(self, now: History) -> str | None:
        """Return why positions of this history are not valid in another; None if it is the same."""
        if now.system_id != self.system_id:
            return f"this is another database (system {now.system_id} instead of {self.system_id})"
        if now.timeline_id != self.timeline_id:
            return (
                f"the database is on timeline {now.timeline_id} instead of {self.timeline_id}: it "
                "was restored to an earlier point, or a standby was promoted"
            )
        return None


class Position(NamedTuple):
    """The end of a transaction in one history; its `str()` fits into any text column.

    Store it in the same transaction as the effect of the consumed one, and pass it as `start=`
    later: then each transaction has its effect once.
    """

    history: History
    lsn: Lsn

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a position that `str()` has written."""
        try:
            system_id, timeline_id, lsn = text.split("/", 2)
            return cls(History(system_id, int(timeline_id)), Lsn.parse(lsn))
        except ValueError:
            raise ValueError(f"{text!r} is not a position: store str(txn.position)") from None

    def __str__(self) -> str:
        return f"{self.history}/{self.lsn}"


# Why the `start=` of a consumer is refused.


def before_the_slot(start: Position) -> str:
    """Return the reason for a position from before the slot was created."""
    return (
        f"the position {start} is older than the replication slot, which had to be created again: "
        "the transactions after that position are lost"
    )


def beyond_the_end(start: Position, end: Lsn) -> str:
    """Return the reason for a position after the end of the WAL."""
    return (
        f"the position {start} is beyond the end of the database's WAL, {end}: a copy of its disk "
        "was restored"
    )


def of_another_history(start: Position, history: History) -> str:
    """Return the reason for a position of another database or timeline."""
    return f"the position {start} belongs to another history than the database's, {history}"
