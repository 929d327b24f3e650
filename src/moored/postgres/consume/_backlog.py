"""What a consumer was given and has not acknowledged, for when it comes back.

A consumer that fails and comes back at once needs the same transactions again. While they are few
they are kept here, so that nobody else notices; when they are many only the server has them, and
the stream must begin again for this consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..decode import Committed

__all__ = ["Backlog"]


class Backlog:
    """The transactions after the last one that a consumer has acknowledged, unless too many.

    :param bytes_limit: with more bytes than this, or with more transactions than `length_limit`,
        nothing is kept.
    """

    __slots__ = ("_bytes", "_bytes_limit", "_kept", "_length_limit", "complete")

    def __init__(self, bytes_limit: int, length_limit: int, complete: bool = True) -> None:
        self._bytes_limit = bytes_limit
        self._length_limit = length_limit
        self._kept: deque[Committed] = deque()
        self._bytes = 0
        #: Whether everything after the last acknowledgement is here.
        self.complete = complete

    def append(self, committed: Committed) -> None:
        """Keep one more transaction."""
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
        """Return what is kept, and keep it no longer: it is given again."""
        kept, self._kept, self._bytes = self._kept, deque(), 0
        return kept
