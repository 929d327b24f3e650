"""A simulated table with concurrent writers, its stream and its snapshots, and a consumer.

As in PostgreSQL, a commit has two steps: it is written to the WAL, which is the order of the
stream, and a moment later it becomes visible to snapshots; until then it holds its locks.
Transaction IDs pass 2**32, and the stream has their lower half.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from moored.postgres import RESUME, CopyPosition, History, Lsn, Position
from moored.postgres._position import Resume
from moored.postgres.snapshot._follow_core import FollowCore, SavedCopy, Ticket
from moored.postgres.snapshot._join import ChangePart, Chunk, CopyState, Placed, Sight
from moored.postgres.snapshot._position import CopyVersion
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
        truncates = rng.random() < 0.05
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


HISTORY, VERSION = History("1", 1), CopyVersion("orders", "id", "published")


class Exact:
    """A consumer that stores the position with its effect: each change has its effect once.

    Its rows are deleted now and then, and the position with them.
    """

    def __init__(self, sim: Sim, table: SimulatedTable) -> None:
        self._sim = sim
        self._table = table
        self.saw: Counter[str] = Counter()
        # What is stored by the consumer: its rows, and its position.
        self.rows: dict[int, str] = {}
        self._position: str | None = None
        # What the state file has: the copy, and the acknowledged position of the stream.
        self._saved: SavedCopy | None = None
        self._acknowledged = table.lsn

    async def run(self, over: asyncio.Event) -> None:
        """Copy and follow the table until the writers have ended and everything was read."""
        while not await self._live(over):
            self.saw["a crash"] += 1
            if self._sim.rng.random() < 0.1:
                self._delete()

    def _delete(self) -> None:
        self.saw["rows deleted"] += 1
        self.rows.clear()
        self._position = None

    def _start(self) -> CopyPosition | Resume | None:
        return None if self._position is None else CopyPosition.parse(self._position)

    async def _live(self, over: asyncio.Event) -> bool:
        """Follow until the process crashes; return True if everything was read instead."""
        rng, start = self._sim.rng, self._start()
        self._core = FollowCore(start)
        at = start.position.lsn if isinstance(start, CopyPosition) else self._acknowledged
        self._next = bisect.bisect_right([commit.end for commit in self._table.wal], at)
        # The items that were not acknowledged yet, and the ends of transactions among them.
        self._open: deque[tuple[Ticket, int | None]] = deque()
        self._read: tuple[dict[int, str], Chunk] | None = None
        if not self._core.load(self._saved, Lsn(self._acknowledged)):
            await self._begin()
        while not over.is_set() or self._next < len(self._table.wal) or not self._complete:
            await asyncio.sleep(self._sim.random(0, 0.3))
            if rng.random() < 0.05:
                return False
            if rng.random() < 0.2 and not self._acknowledge():
                return False
            commit = self._table.wal[self._next] if self._next < len(self._table.wal) else None
            if commit is not None and self._core.state.ready(commit.xid, commit.end):
                await self._consume(commit)
            elif not self._complete and rng.random() < 0.6 and not self._copy():
                return False
        return True

    @property
    def _complete(self) -> bool:
        return self._core.state.complete

    async def _begin(self) -> None:
        """Wait for the writers, and begin a copy."""
        running = set(self._table.running)
        while running & self._table.running:  # noqa: ASYNC110 - as on a server, without an event
            await asyncio.sleep(0.05)
        self._core.begin(Lsn(self._acknowledged))
        self._save()

    def _save(self) -> None:
        self._saved = self._core.saved(VERSION)

    def _copy(self) -> bool:
        """Read the next chunk, or deliver the one that was read; return False for a crash."""
        if self._read is None:
            after, again = self._after(), self._core.again
            if again is None:
                self._read = self._table.copy(after)
            else:
                self.saw["a chunk again"] += 1
                through = None if again.through is None else int(again.through[0])
                self._read = self._table.copy(after, through, most=None)
            return True
        (rows, chunk), self._read = self._read, None
        self._core.copied(chunk)
        self._save()
        if self._sim.rng.random() < 0.15:
            self._acknowledge()  # an earlier item
            return False
        self._add(rows)
        self._delivered(None)
        return True

    def _after(self) -> int | None:
        after = self._core.state.after
        return None if after is None else int(after[0])

    def _add(self, rows: dict[int, str]) -> None:
        assert not rows.keys() & self.rows.keys(), "a row was copied twice"
        self.rows |= rows
        self.saw["a chunk"] += 1

    def _delivered(self, end: int | None) -> None:
        """Store the position with the effect of an item."""
        self._position = str(self._core.position(HISTORY, VERSION))
        self._open.append((self._core.ticket(), end))

    def _acknowledge(self) -> bool:
        """Acknowledge the first item that is open; return False for a crash in between."""
        if not self._open:
            return True
        ticket, end = self._open.popleft()
        if self._core.acknowledge(ticket, lambda: self._acknowledged):
            self._save()
        if self._sim.rng.random() < 0.1:
            return False
        if end is not None:
            self._acknowledged = max(self._acknowledged, end)
        return True

    async def _consume(self, commit: Commit) -> None:
        self._next += 1
        state = self._core.state
        self._core.lsn = Lsn(commit.end)
        if state.settled(commit.end):
            for change in commit.changes:
                self._apply(change, ChangePart.WHOLE)
        else:
            joined = state.join(commit.xid, commit.end, map(self._placed, commit.changes))
            if joined.begin_again:
                self.saw["begun again"] += 1
                self.rows.clear()
                self._position = None
                self._core.void()
                self._read = None
                await self._begin()
                self._open.append((self._core.ticket(), commit.end))
                return
            for change, part in joined.kept:
                self._apply(change, part)
        self._delivered(commit.end)

    def _placed(self, change: RowChange | str) -> Placed:
        if isinstance(change, str):
            return Placed(change, truncate=True)
        return Placed(change, self._place(change.old), self._place(change.new))

    def _place(self, key: int | None) -> int | None:
        bounds = [int(bound) for (bound,) in self._core.state.bounds]
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
        state = CopyState()
        while not state.complete and self._sim.rng.random() < 0.8:
            after = None if state.after is None else int(state.after[0])
            _, first = self._table.copy(after)
            through = None if first.through is None else int(first.through[0])
            ahead = None
            if through is not None:
                most = self._sim.rng.choice([CHUNK, None])
                ahead = self._table.copy(through, most=most)
                await asyncio.sleep(self._sim.random(0, 0.5))
            for rows, chunk in (self._table.copy(after, through, most=None), ahead or ({}, None)):
                self._add(rows)
                state = state if chunk is None else state.copied(chunk)
            if ahead is not None:
                self.saw["an earlier snapshot"] += 1
        if state.chunks:
            position = Position(HISTORY, Lsn(self._acknowledged))
            self._position = str(CopyPosition(position, state, VERSION))
        await super().run(over)


class AtLeastOnce(Exact):
    """A consumer that only acknowledges, a while after its effect: a crash repeats what is between.

    If its rows are deleted, it begins a new copy once.
    """

    def _start(self) -> CopyPosition | Resume | None:
        start, self._position = None if self._position == "deleted" else RESUME, None
        return start

    def _delete(self) -> None:
        super()._delete()
        self._position = "deleted"

    def _add(self, rows: dict[int, str]) -> None:
        self.rows |= rows
        self.saw["a chunk"] += 1

    def _apply(self, change: RowChange | str, part: ChangePart) -> None:
        if isinstance(change, str):
            self.rows.clear()
            return
        if change.old is not None and part is not ChangePart.WRITE:
            self.rows.pop(change.old, None)
        if change.new is not None and part is not ChangePart.DELETE:
            self.rows[change.new] = change.value
