"""Whether the server sends again what it has sent before: the proof that its log is the same one.

A copy of a server's disk that is put back has the same system identifier, the same timeline and the
same slot; once enough was written to it, its log is as long as before, too. But it does not have
the commits that were received after the copy was made. So what a slot sends again is compared with
what was received: the last commit must be among it, and none that is new may end before the place
up to which everything was received.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from .._lsn import Lsn

__all__ = ["NO_COMMIT", "CommitMark", "Continuity"]


class CommitMark(NamedTuple):
    """Where a commit ends, and its time: in two logs the one may be the same, and not both."""

    end: int
    #: In microseconds since 2000, by the server's clock.
    time: int

    def __str__(self) -> str:
        return f"{Lsn(self.end)} {self.time}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The mark that `str()` wrote."""
        end, time = text.split()
        return cls(Lsn.parse(end), int(time))


#: No commit was received, or it is not known which.
NO_COMMIT = CommitMark(0, 0)


class Continuity:
    """Compares what a slot sends again with what was received before.

    :param last: the last commit that was received.
    :param told: everything before this place was received.
    :param confirmed: where the slot stands: what was committed after it comes again.
    """

    def __init__(self, last: CommitMark, told: int, confirmed: int) -> None:
        self._last = last
        self._told = max(told, last.end)
        # The slot is told last bytes: at the byte before the end, the commit does not come again.
        self._expected = confirmed + 1 < last.end
        #: Whether there is nothing more to compare.
        self.proven = last == NO_COMMIT or confirmed + 1 >= self._told

    def committed(self, commit: CommitMark) -> str | None:
        """A commit was sent; return why it cannot be of the same log."""
        if commit == self._last:
            self._expected = False
            return None
        return self._judge(commit.end, new=self._last.end <= commit.end <= self._told)

    def passed(self, end: int) -> str | None:
        """Everything up to this place was sent; return why it cannot be of the same log."""
        return self._judge(end, new=False)

    def _judge(self, end: int, *, new: bool) -> str | None:
        if new or (self._expected and end > self._last.end):
            return (
                f"the database's log has other commits than before: the last one that was received "
                f"ended at {Lsn(self._last.end)}, and "
                + (f"a new one ends at {Lsn(end)}" if new else "is not there any more")
                + ": a copy of its disk was put back"
            )
        if end > self._told:
            self.proven = True
        return None
