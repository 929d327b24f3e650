"""A simulated table with concurrent writers, its stream and its snapshots, and a consumer.

As in PostgreSQL, a commit has two steps: it is written to the WAL, which is the order of the
stream, and a moment later it becomes visible to snapshots; until then it holds its locks.
Transaction IDs pass 2**32, and the stream has their lower half.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from moored.postgres.snapshot._join import ChangePart, Chunk, CopyState, Placed, Sight
from moored.testing import Sim

__all__ = ["KEYS", "AtLeastOnce", "Exact", "SimulatedTable", "TwoAtOnce", "write"]

KEYS = 12
CHUNK = 3


class RowChange(NamedTuple):
    old: int | None
    new: int | None
    value: str = ""


class Commit(NamedTuple):
    xid: int
    end: int
    #: "truncate" for a TRUNCATE.
    changes: list[RowChange | str]


@dataclass
class SimulatedTable:
    """The rows, the WAL, and which transactions run."""

    rows: dict[int, str] = field(default_factory=dict)
    wal: list[Commit] = field(default_factory=list)
    lsn: int = 1000
    next_xid: int = 2**32 - 3
    completed: int = 2**32 - 4
    running: set[int] = field(default_factory=set)
    locked: set[int] = field(default_factory=set)
    #: Set when a commit was written to the WAL.
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> int:
        xid = self.next_xid
        self.next_xid += 1
        self.running.add(xid)
        return xid

    def log(self, xid: int, changes: list[RowChange | str]) -> None:
        self.lsn += 8
        self.wal.append(Commit(xid & 0xFFFFFFFF, self.lsn, changes))
        self.news.set()

    def show(self, xid: int, changes: list[RowChange | str]) -> None:
        """Make a transaction visible, and end it."""
        for change in changes:
            if isinstance(change, str):
                self.rows.clear()
                continue
            if change.old is not None:
                self.rows.pop(change.old)
            if change.new is not None:
                self.rows[change.new] = change.value
        self.running.discard(xid)
        self.completed = max(self.completed, xid)

    def sight(self) -> Sight:
        xmax = self.completed + 1
        return Sight(xmax, frozenset(xid for xid in self.running if xid < xmax))

    def copy(
        self, after: int | None, through: int | None = None, most: int | None = CHUNK
    ) -> tuple[dict[int, str], Chunk]:
        """Copy a chunk after a key: up to another one, or so many rows."""
        keys = [key for key in sorted(self.rows) if after is None or key > after]
        if through is not None:
            keys = [key for key in keys if key <= through]
        elif most is not None and len(keys) >= most:
            keys = keys[:most]
            through = keys[-1]
        bound = None if through is None else (str(through),)
        # Other transactions write to the WAL, too.
        self.lsn += 1
        return {key: self.rows[key] for key in keys}, Chunk(bound, self.sight(), self.lsn)


async def write(sim: Sim, table: SimulatedTable, transactions: int) -> None:
    """Commit and roll back random transactions."""
    rng = sim.rng
    for _ in range(transactions):
        await asyncio.sleep(sim.random(0, 0.3))
        truncates = rng.random() < 0.03
        wanted = set(range(KEYS)) if truncates else set(rng.sample(range(KEYS), rng.randint(1, 3)))
        if wanted & table.locked:
            continue
        table.locked |= wanted
        xid = table.begin()
        await asyncio.sleep(sim.random(0, 0.2))
        changes: list[RowChange | str] = ["truncate"] if truncates else []
        mine = {} if truncates else {key: table.rows[key] for key in wanted if key in table.rows}
        for number in range(rng.randint(1, 4)):
            key, value = rng.choice(sorted(wanted)), f"{xid}.{number}"
            if key not in mine:
                mine[key] = value
                changes.append(RowChange(None, key, value))
                continue
            del mine[key]
            other = rng.choice(sorted(wanted))
            if rng.random() < 0.25:
                changes.append(RowChange(key, None))
            else:
                target = other if other not in mine else key
                mine[target] = value
                changes.append(RowChange(key, target, value))
        await asyncio.sleep(sim.random(0, 0.2))
        if rng.random() < 0.8:
            table.log(xid, changes)
            # A commit that waits for a synchronous standby is visible much later.
            await asyncio.sleep(sim.random(0, 1) if rng.random() < 0.2 else 0)
            table.show(xid, changes)
        else:
            table.show(xid, [])
        table.locked -= wanted


class Exact:
    """A consumer that stores the position with its effect: each change has its effect once."""

    def __init__(self, sim: Sim, table: SimulatedTable) -> None:
        self._sim = sim
        self._table = table
        self.rows: dict[int, str] = {}
        self.saw: Counter[str] = Counter()
        # What is stored: the next transaction of the stream, and the state of the copy.
        self._next = len(table.wal)
        self._state = CopyState()

    async def run(self, over: asyncio.Event) -> None:
        """Copy and follow the table until the writers have ended and everything was read."""
        rng = self._sim.rng
        while not over.is_set() or self._next < len(self._table.wal) or not self._state.complete:
            await asyncio.sleep(self._sim.random(0, 0.3))
            if rng.random() < 0.05:
                self._crash()
            commit = self._table.wal[self._next] if self._next < len(self._table.wal) else None
            if commit is not None and self._state.ready(commit.xid, commit.end):
                self._consume(commit)
            elif not self._state.complete and rng.random() < 0.5:
                self._copy()
            elif rng.random() < 0.2:
                self._state = self._state.forget(self._lsn())

    def _lsn(self) -> int:
        return self._table.wal[self._next - 1].end if self._next else 0

    def _crash(self) -> None:
        """Continue from what is stored."""
        self.saw["a crash"] += 1
        self._state = CopyState.load(self._state.forget(self._lsn()).dump())

    def _copy(self) -> None:
        self._add(*self._table.copy(self._after()))

    def _after(self) -> int | None:
        after = self._state.after
        return None if after is None else int(after[0])

    def _add(self, rows: dict[int, str], chunk: Chunk) -> None:
        assert not rows.keys() & self.rows.keys(), "a row was copied twice"
        self.rows |= rows
        self._state = self._state.copied(chunk)
        self.saw["a chunk"] += 1

    def _consume(self, commit: Commit) -> None:
        if self._state.settled(commit.end):
            self._next += 1
            for change in commit.changes:
                self._apply(change, ChangePart.WHOLE)
            return
        joined = self._state.join(commit.xid, commit.end, map(self._placed, commit.changes))
        self._next += 1
        if joined.begin_again:
            self.saw["begun again"] += 1
            self.rows.clear()
            self._state = CopyState()
        for change, part in joined.kept:
            self._apply(change, part)

    def _placed(self, change: RowChange | str) -> Placed:
        if isinstance(change, str):
            return Placed(change, truncate=True)
        return Placed(change, self._place(change.old), self._place(change.new))

    def _place(self, key: int | None) -> int | None:
        bounds = [int(bound) for (bound,) in self._state.bounds]
        return None if key is None else bisect.bisect_left(bounds, key)

    def _apply(self, change: RowChange | str, part: ChangePart) -> None:
        self.saw[f"{part.value} of {'truncate' if isinstance(change, str) else 'a row'}"] += 1
        if isinstance(change, str):
            self.rows.clear()
            return
        if change.old is not None and part is not ChangePart.WRITE:
            assert change.old in self.rows, "a row to be deleted or updated does not exist"
            del self.rows[change.old]
        if change.new is not None and part is not ChangePart.DELETE:
            assert change.new not in self.rows, "a row to be inserted exists"
            self.rows[change.new] = change.value


class TwoAtOnce(Exact):
    """A snapshot, whose chunks are read two at a time, and a follower that continues it.

    The second chunk of the two may have the earlier snapshot.
    """

    async def run(self, over: asyncio.Event) -> None:
        """Read some chunks, or all, before the stream is consumed."""
        while not self._state.complete and self._sim.rng.random() < 0.8:
            after = self._after()
            _, first = self._table.copy(after)
            second = None
            if first.through is not None:
                most = self._sim.rng.choice([CHUNK, None])
                second = self._table.copy(int(first.through[0]), most=most)
                await asyncio.sleep(self._sim.random(0, 0.5))
            through = None if first.through is None else int(first.through[0])
            self._add(*self._table.copy(after, through, most=None))
            if second is not None:
                self._add(*second)
                self.saw["an earlier snapshot"] += 1
        await super().run(over)


class AtLeastOnce(Exact):
    """A consumer that acknowledges a while after its effect: a crash repeats what is between.

    Chunks are recorded before they are delivered. After a crash, the unacknowledged ones are copied
    again, and the changes after their first snapshots are delivered again.
    """

    def __init__(self, sim: Sim, table: SimulatedTable) -> None:
        super().__init__(sim, table)
        self._acknowledged = self._next
        self._acked = 0
        self._again: list[Chunk] = []

    def _crash(self) -> None:
        self.saw["a crash"] += 1
        self._next = self._acknowledged
        chunks = self._state.chunks
        self._state = CopyState(chunks[: self._acked])
        self._again = [*chunks[self._acked :], *self._again]

    def _copy(self) -> None:
        if not self._again:
            rows, chunk = self._table.copy(self._after())
        else:
            self.saw["a chunk again"] += 1
            chunk = self._again.pop(0)
            through = None if chunk.through is None else int(chunk.through[0])
            rows, _ = self._table.copy(self._after(), through, most=None)
        self.rows |= rows
        self._state = self._state.copied(chunk)
        self.saw["a chunk"] += 1
        self._acknowledge()

    def _consume(self, commit: Commit) -> None:
        super()._consume(commit)
        if not self._state.chunks:  # begun again, which is stored at once
            self._acked, self._acknowledged, self._again = 0, self._next, []
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self._sim.rng.random() < 0.4:
            # An acknowledged transaction includes the chunks that were delivered before it.
            self._acked, self._acknowledged = len(self._state.chunks), self._next

    def _apply(self, change: RowChange | str, part: ChangePart) -> None:
        if isinstance(change, str):
            self.rows.clear()
            return
        if change.old is not None and part is not ChangePart.WRITE:
            self.rows.pop(change.old, None)
        if change.new is not None and part is not ChangePart.DELETE:
            self.rows[change.new] = change.value
