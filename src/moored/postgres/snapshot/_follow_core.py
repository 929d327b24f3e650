"""Where a follower continues, what its chunks contain, and what is acknowledged; without I/O.

The shell (`_follow.py`) reads chunks and transactions, and writes `saved()` to the state file:
after `begin`, after `copied` and before the chunk is delivered, and when `acknowledge` requires it.

- A consumer that stores positions itself has the rows of exactly the chunks in its position. If it
  has no position, it has no rows: whatever the state file has, a new copy begins.
- A consumer that resumes may have the rows of chunks that it has not acknowledged. They are copied
  again, with another snapshot, and joined as if they were read with the first one: a row that was
  deleted in between is not in the second reading, so its deletion must be delivered.
- A chunk is saved before it is delivered, or its first snapshot would be unknown after a crash.
- A `Reset` makes all earlier acknowledgements invalid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .._lsn import Lsn
from .._position import RESUME, History, Position, Resume
from ._join import Chunk, CopyState
from ._position import CopyPosition, CopyVersion

__all__ = ["FollowCore", "SavedCopy", "Ticket"]

_OTHER = "the consumer had a copy of another table, or with another where= or columns="
_ALTERED = "the table was altered since its copy began"
_UNPUBLISHED = "the table was not published when its snapshot began, or not all the time since then"
_KEYLESS = "the table has no primary key, so its copy cannot be continued"


class SavedCopy(NamedTuple):
    """The state of a copy in the state file."""

    version: CopyVersion
    #: How many of the chunks the consumer has acknowledged; the others may have been delivered.
    acked: int
    state: CopyState


class Ticket(NamedTuple):
    """What the acknowledgement of an item acknowledges."""

    #: A copy that begins again is another generation.
    generation: int
    #: The number of the last chunk that was delivered before it.
    number: int


class FollowCore:
    """The decisions of one follower.

    :param start: the `start=` of the consumer.
    """

    def __init__(self, start: CopyPosition | Resume | None) -> None:
        self._start = start
        self._version = CopyVersion()
        self.state = CopyState()
        #: The end of the last transaction that was delivered.
        self.lsn = Lsn(0)
        # Chunks that may have been delivered before a crash: they are copied again.
        self._again: list[Chunk] = []
        # The numbers of the acknowledged chunks, and of those that were merged.
        self._acked = self._merged = self._generation = 0
        self._unsaved = False

    # -- begin and continue ----------------------------------------------------------------------

    def load(self, saved: SavedCopy | None, acknowledged: Lsn) -> bool:
        """Continue a copy; return False if a new one must begin.

        :param saved: what the state file has.
        :param acknowledged: the position of the consumer's stream, unless it has stored one itself.
        """
        start = self._start
        if isinstance(start, CopyPosition):
            acknowledged = start.position.lsn
            saved = SavedCopy(start.version, len(start.state.chunks), start.state)
        elif start is not RESUME:
            saved = None
        if saved is None or not saved.state.chunks:
            return False
        chunks = saved.state.chunks
        self._version, self._acked, self.lsn = saved.version, saved.acked, acknowledged
        self.state = CopyState(chunks[: saved.acked])
        self._again = list(chunks[saved.acked :])
        return True

    def obstacle(self, now: CopyVersion, *, keyed: bool) -> str | None:
        """Return why the loaded copy must begin again; None if it can be continued.

        :param now: the table as it is now.
        :param keyed: whether the table has a key.
        """
        before = self._version
        if before.source != now.source:
            return _OTHER
        if isinstance(self._start, CopyPosition) and before.published != now.published:
            return _UNPUBLISHED
        if self.state.complete:
            return None
        if before.columns != now.columns:
            return _ALTERED
        return None if keyed else _KEYLESS

    def begin(self, acknowledged: Lsn) -> None:
        """Begin a new copy: every later snapshot sees what the stream had up to this LSN."""
        self.void()
        self.lsn = acknowledged

    def void(self) -> None:
        """Forget what was delivered; its acknowledgements have no effect any more."""
        self._generation += 1
        self.state, self._again, self._acked, self._merged = CopyState(), [], 0, 0

    # -- chunks and transactions -----------------------------------------------------------------

    @property
    def again(self) -> Chunk | None:
        """The chunk that must be copied again next; None if the next one is a new one."""
        return self._again[0] if self._again else None

    def copied(self, chunk: Chunk) -> None:
        """Add the next chunk, as it was read now."""
        if self._again:
            # The rows are as new as the second reading: see `CopyState.settled`.
            self.state = self.state.copied(self._again.pop(0)).stretched(chunk.limit)
        else:
            self.state = self.state.copied(chunk)

    def stretch(self, limit: int) -> None:
        """Record that a row was delivered as it was at this LSN."""
        self.state = self.state.stretched(limit)
        self._unsaved = True

    def position(self, history: History, version: CopyVersion) -> CopyPosition:
        """Return the position after the last item."""
        return CopyPosition(Position(history, self.lsn), self.state, version)

    # -- acknowledgements ------------------------------------------------------------------------

    def ticket(self) -> Ticket:
        """Return what the next item acknowledges."""
        return Ticket(self._generation, self._merged + len(self.state.chunks))

    def acknowledge(self, ticket: Ticket, passed: Callable[[], int]) -> bool:
        """Acknowledge an item and the chunks before it; return whether that must be saved.

        :param passed: returns the stored position of the consumer's stream.
        """
        generation, number = ticket
        if generation != self._generation or (number <= self._acked and not self._unsaved):
            return False
        self._acked = max(number, self._acked)
        # Chunks whose snapshots the stored position has passed are merged into one.
        before = len(self.state.chunks)
        self.state = self.state.forget(passed(), self._acked - self._merged)
        self._merged += before - len(self.state.chunks)
        return True

    def saved(self, version: CopyVersion) -> SavedCopy:
        """Return what is written to the state file now."""
        self._unsaved = False
        state = CopyState((*self.state.chunks, *self._again))
        return SavedCopy(version, self._acked - self._merged, state)
