"""The age of the oldest unacknowledged transaction, without a timestamp for each transaction."""

from __future__ import annotations

from collections import deque

__all__ = ["Lag"]

#: The resolution in seconds: transactions that are received within this time share one timestamp.
EVERY = 0.1
#: With so many timestamps, pairs of them are merged, and the resolution is halved.
MOST = 1000


class Lag:
    """Timestamps of received transactions: one for each interval, with the LSN at its end.

    A consumer may be stuck for days: the older the transactions, the coarser the resolution.
    """

    __slots__ = ("_every", "_notes", "_since", "due")

    def __init__(self) -> None:
        self._every = EVERY
        self._notes: deque[tuple[float, int]] = deque()
        #: When the current interval began.
        self._since = 0.0
        #: When `note` must be called next: all that the hot path compares.
        self.due = 0.0

    def note(self, seen: int, flushed: int, now: float) -> None:
        """Start the next interval with a new transaction.

        :param seen: the end of the last transaction before it.
        :param flushed: everything before this LSN is acknowledged.
        """
        self._notes.append((self._since, seen))
        while self._notes and self._notes[0][1] <= flushed:
            self._notes.popleft()
        if not self._notes:
            self._every = EVERY
        elif len(self._notes) >= MOST:
            self._every *= 2
            notes = list(self._notes)
            pairs = zip(notes[::2], notes[1::2], strict=False)
            self._notes = deque((first[0], second[1]) for first, second in pairs)
        self._since = now
        self.due = now + self._every

    def seconds(self, flushed: int, seen: int, now: float) -> float:
        """Return the age of the oldest unacknowledged transaction; 0 if there is none.

        :param flushed: everything before this LSN is acknowledged.
        :param seen: the end of the last received transaction.
        """
        if flushed >= seen or not self.due:
            return 0.0
        notes = tuple(self._notes)
        return now - next((since for since, end in notes if end > flushed), self._since)

    def __len__(self) -> int:
        return len(self._notes)
