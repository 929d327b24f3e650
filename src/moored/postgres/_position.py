"""A place in one database's history that a user can keep."""

from __future__ import annotations

from typing import NamedTuple, Self

from ._lsn import Lsn

__all__ = ["History", "Position", "before_the_slot", "beyond_the_end", "of_another_history"]


class History(NamedTuple):
    """Which database it is, and which of its timelines."""

    system_id: str
    timeline_id: int

    def __str__(self) -> str:
        return f"{self.system_id}/{self.timeline_id}"


class Position(NamedTuple):
    """The end of a transaction in one history; as a text it fits into any column.

    Store it in the same transaction as the effect of what was consumed, and pass it as
    `start=` later: then each transaction has its effect once.
    """

    history: History
    lsn: Lsn

    @classmethod
    def parse(cls, text: str) -> Self:
        """The position that `str()` wrote."""
        try:
            system_id, timeline_id, lsn = text.split("/", 2)
            return cls(History(system_id, int(timeline_id)), Lsn.parse(lsn))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a position: keep what str(txn.position) gives"
            ) from None

    def __str__(self) -> str:
        return f"{self.history}/{self.lsn}"


# Why a position that a consumer has chosen is refused.


def before_the_slot(start: Position) -> str:
    """It is of a time before the slot was made."""
    return (
        f"the position {start} is of a replication slot that was missing: what came after it is "
        "not known"
    )


def beyond_the_end(start: Position, end: Lsn) -> str:
    """It is not in the log, which ends before it."""
    return (
        f"the position {start} is beyond the end of the database's log, {end}: a copy of its disk "
        "was put back"
    )


def of_another_history(start: Position, history: History) -> str:
    """It is of another history than the database's."""
    return f"the position {start} is of another history than the database's, {history}"
