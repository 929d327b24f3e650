"""How old the first thing is that was received and is not acknowledged, without a note for each."""

from __future__ import annotations

from collections import deque

__all__ = ["Lag"]

#: All that is received within so many seconds counts as one: that is how exact the answer is.
EVERY = 0.1
#: With more notes than this each two become one, and they come half as often from then on.
MOST = 1000


class Lag:
    """When what was received: a note for each short time, with how far it was at its end.

    A consumer may stand still for days: the older that is, the less exact it need be.
    """

    __slots__ = ("_every", "_notes", "_since", "due")

    def __init__(self) -> None:
        self._every = EVERY
        self._notes: deque[tuple[float, int]] = deque()
        #: When the time began that has no end yet.
        self._since = 0.0
        #: Before this there is nothing to note: the hot path compares, and does no more.
        self.due = 0.0

    def note(self, seen: int, flushed: int, now: float) -> None:
        """A transaction comes, after those that end at `seen`; before `flushed` all is safe."""
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
        """For how long something has been waiting to be acknowledged; 0 if nothing is.

        :param flushed: everything before this place is acknowledged.
        :param seen: the end of the last transaction that was received.
        """
        if flushed >= seen or not self.due:
            return 0.0
        notes = tuple(self._notes)
        return now - next((since for since, end in notes if end > flushed), self._since)

    def __len__(self) -> int:
        return len(self._notes)
