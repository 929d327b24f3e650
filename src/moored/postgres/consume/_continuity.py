"""Detect a restored copy of the server's disk by the commits that the slot sends again.

A restored copy has the same system identifier, timeline and slot; once enough was written to it,
its WAL is as long as before, too. But it lacks the commits that were received after the copy was
made. So the commits that the slot sends again are compared with those that were received: the last
received commit must be among them, and no new commit may end before the LSN up to which everything
was received.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from .._lsn import Lsn

__all__ = ["NO_COMMIT", "CommitMark", "Continuity"]


class CommitMark(NamedTuple):
    """The end and the time of a commit: in another history, they cannot both be the same."""

    end: int
    #: In microseconds since 2000, by the server's clock.
    time: int

    def __str__(self) -> str:
        return f"{Lsn(self.end)} {self.time}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a mark that `str()` has written."""
        end, time = text.split()
        return cls(Lsn.parse(end), int(time))


#: No commit was received, or the last one is unknown.
NO_COMMIT = CommitMark(0, 0)


class Continuity:
    """Compares the commits that a slot sends again with those that were received before.

    :param last: the last received commit.
    :param received: everything before this LSN was received.
    :param confirmed: the slot's confirmed LSN: later commits are sent again.
    """

    def __init__(self, last: CommitMark, received: int, confirmed: int) -> None:
        self._last = last
        self._received = max(received, last.end)
        # A commit is sent again unless its last byte was confirmed, which is its end - 1.
        self._expected = confirmed + 1 < last.end
        #: Whether there is nothing left to compare.
        self.proven = last == NO_COMMIT or confirmed + 1 >= self._received

    def committed(self, commit: CommitMark) -> str | None:
        """Compare a commit; return why it belongs to another history, None if it may not."""
        if commit == self._last:
            self._expected = False
            return None
        return self._compare(commit.end, new=self._last.end <= commit.end <= self._received)

    def passed(self, end: int) -> str | None:
        """Compare when everything up to this LSN was sent; return as `committed` does."""
        return self._compare(end, new=False)

    def _compare(self, end: int, *, new: bool) -> str | None:
        if new or (self._expected and end > self._last.end):
            return (
                "the database's WAL has other commits than before: the last received commit ended "
                f"at {Lsn(self._last.end)}, and "
                + (f"a new one ends at {Lsn(end)}" if new else "no longer exists")
                + ": a copy of its disk was restored"
            )
        if end > self._received:
            self.proven = True
        return None
