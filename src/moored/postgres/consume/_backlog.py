"""The unacknowledged transactions of a consumer, for when it attaches again.

A consumer that fails and attaches again needs the same transactions again. If they are few they are
kept here, without an effect on other consumers. If they are many, only the server has them, and the
stream must be restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..decode import Committed

__all__ = ["Backlog"]


class Backlog:
    """The unacknowledged transactions of a consumer, unless there are too many.

    :param bytes_limit: with more bytes than this, or more transactions than `length_limit`, none is
        kept.
    """

    __slots__ = ("_bytes", "_bytes_limit", "_kept", "_length_limit", "complete")

    def __init__(self, bytes_limit: int, length_limit: int, complete: bool = True) -> None:
        self._bytes_limit = bytes_limit
        self._length_limit = length_limit
        self._kept: deque[Committed] = deque()
        self._bytes = 0
        #: Whether all unacknowledged transactions are here.
        self.complete = complete

    def append(self, committed: Committed) -> None:
        """Keep a transaction."""
        if not self.complete:
            return
        self._kept.append(committed)
        self._bytes += committed.body.size
        if self._bytes > self._bytes_limit or len(self._kept) > self._length_limit:
            self.complete = False
            self._kept.clear()
            self._bytes = 0

    def acknowledged(self, end: int) -> None:
        """Forget the transactions that end here or before."""
        kept = self._kept
        while kept and kept[0].end_lsn <= end:
            self._bytes -= kept.popleft().body.size

    def take(self) -> Sequence[Committed]:
        """Remove and return the transactions, to deliver them again."""
        kept, self._kept, self._bytes = self._kept, deque(), 0
        return kept
