"""Join the chunks of a copy and the stream of changes, without I/O.

A table is copied in chunks by ranges of its key, in ascending order, each with a snapshot of its
own; the stream has the changes in the order of their commits. The order in which commits become
visible to snapshots is another one, so LSNs do not tell what a chunk contains. Its snapshot does: a
transaction is in the chunk if the snapshot sees its transaction ID.

- A change of a row in a finished chunk is delivered unless the chunk's snapshot sees it.
- A change of a row in a chunk that is not copied yet is not delivered: a later snapshot sees it,
  because the stream is never consumed beyond the last chunk's snapshot (`ready`).
- An update of a key may move a row from one chunk to another. Each side is decided by itself: the
  row may have to be deleted here, written there, both or neither.
- TRUNCATE has no key. If some chunks are from before it and some from after it, the copy begins
  again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple, Self

from .._lsn import Lsn

__all__ = ["ChangePart", "Chunk", "CopyState", "Joined", "Key", "Placed", "Sight"]

#: The values of the key's columns, as the server writes them.
Key = tuple[str, ...]


class Sight(NamedTuple):
    """Which transactions a snapshot sees, as pg_current_snapshot() reports it."""

    #: The snapshot sees no transaction ID from here on (64 bits).
    xmax: int
    #: The transactions below it that had not ended.
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `xmin:xmax:xip_list`."""
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Return whether it sees a committed transaction by its ID in the stream (32 bits)."""
        # The stream has the lower half of the ID. The other half is that of the nearest ID.
        ahead = (xid - self.xmax) & 0xFFFFFFFF
        full = self.xmax + ahead - (1 << 32 if ahead >= 1 << 31 else 0)
        return full < self.xmax and full not in self.running

    def __str__(self) -> str:
        xmin = min(self.running, default=self.xmax)
        return f"{xmin}:{self.xmax}:{','.join(map(str, sorted(self.running)))}"


class Chunk(NamedTuple):
    """A finished chunk: the rows after the chunk before it, up to a key."""

    #: The last key of its range; None for the end of the table.
    through: Key | None
    sight: Sight
    #: The end of the WAL when its snapshot was taken: it sees no later commit, whatever its ID.
    limit: int

    def has(self, xid: int, end: int) -> bool:
        """Return whether its rows contain the changes of a transaction that ends at this LSN."""
        return end <= self.limit and self.sight.sees(xid)


class ChangePart(Enum):
    """Which part of a change is delivered."""

    WHOLE = "whole"
    #: Of an update of the key, only that the old row is gone.
    DELETE = "delete"
    #: Of an update of the key, only the new row.
    WRITE = "write"


class Placed(NamedTuple):
    """A change, and the chunks of its old and its new key, by their numbers.

    The number of a chunk that is not copied yet is that of the last chunk + 1.
    """

    change: Any
    old: int | None = None
    new: int | None = None
    truncate: bool = False


class Joined(NamedTuple):
    """The changes of a transaction that are delivered, in their order."""

    kept: list[tuple[Any, ChangePart]]
    #: The table was truncated between two chunks: the copy must begin again.
    begin_again: bool = False


@dataclass(frozen=True)
class CopyState:
    """How far a table is copied, and what the chunks contain."""

    chunks: tuple[Chunk, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all chunks are copied."""
        return bool(self.chunks) and self.chunks[-1].through is None

    @property
    def bounds(self) -> list[Key]:
        """The last keys of the chunks, except the one that reaches the end of the table."""
        return [chunk.through for chunk in self.chunks if chunk.through is not None]

    @property
    def after(self) -> Key | None:
        """The key after which the next chunk begins; None for the first chunk."""
        return self.chunks[-1].through if self.chunks else None

    def copied(self, chunk: Chunk) -> CopyState:
        """Return the state after one more chunk."""
        return CopyState((*self.chunks, chunk))

    def ready(self, xid: int, end: int) -> bool:
        """Return whether a transaction may be joined: every later snapshot will see it."""
        return self.complete or (bool(self.chunks) and self.chunks[-1].has(xid, end))

    def settled(self, end: int) -> bool:
        """Return whether transactions that end after this LSN are delivered as they are."""
        # A later chunk may have an earlier snapshot: two are read at the same time.
        return self.complete and end > max(chunk.limit for chunk in self.chunks)

    def lacks(self, place: int | None, xid: int, end: int) -> bool:
        """Return whether a finished chunk does not contain a change of one of its rows."""
        if place is None or place >= len(self.chunks):
            return False
        return not self.chunks[place].has(xid, end)

    def join(self, xid: int, end: int, changes: Iterable[Placed]) -> Joined:
        """Return what must be delivered of a transaction that is `ready`."""
        kept = []
        for each in changes:
            if each.truncate:
                lacking = [self.lacks(place, xid, end) for place in range(len(self.chunks))]
                if any(lacking) and not all(lacking):
                    return Joined([], begin_again=True)
                if any(lacking):
                    kept.append((each.change, ChangePart.WHOLE))
                continue
            if (part := self._part(xid, end, each.old, each.new)) is not None:
                kept.append((each.change, part))
        return Joined(kept)

    def _part(self, xid: int, end: int, old: int | None, new: int | None) -> ChangePart | None:
        if old is None or new is None or old == new:
            place = old if new is None else new
            # Without any key, it is not a change of a row.
            return ChangePart.WHOLE if place is None or self.lacks(place, xid, end) else None
        gone, written = self.lacks(old, xid, end), self.lacks(new, xid, end)
        if gone and written:
            return ChangePart.WHOLE
        return ChangePart.DELETE if gone else ChangePart.WRITE if written else None

    def forget(self, lsn: int, most: int | None = None) -> CopyState:
        """Merge the first chunks whose limit the consumer has passed: later changes are after them.

        :param most: merge among so many chunks at most.
        """
        passed = list(takewhile(lambda chunk: chunk.limit <= lsn, self.chunks[:most]))
        if not passed:
            return self
        merged = Chunk(passed[-1].through, Sight(0, frozenset()), 0)
        return CopyState((merged, *self.chunks[len(passed) :]))

    def stretched(self, lsn: int) -> CopyState:
        """Return a state that is not `settled` before this LSN."""
        last = self.chunks[-1]
        return CopyState((*self.chunks[:-1], last._replace(limit=max(last.limit, lsn))))

    def dump(self) -> list[Any]:
        """Return it as plain data."""
        return [[each.through, str(each.sight), str(Lsn(each.limit))] for each in self.chunks]

    @classmethod
    def load(cls, data: Iterable[Any]) -> CopyState:
        """Return the state that `dump` has described."""
        return cls(
            tuple(
                Chunk(
                    None if through is None else tuple(through), Sight.parse(sight), Lsn.parse(at)
                )
                for through, sight, at in data
            )
        )
