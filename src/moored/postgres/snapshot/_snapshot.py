"""`Postgres.snapshot()`: the rows of a table, and where the stream of its changes continues."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Self, TypeVar

import psycopg

from moored.kernel import Clock, start_task

from .._errors import PostgresError
from .._lsn import Lsn
from .._position import History, Position
from ..decode import Row
from ._join import Chunk, CopyState
from ._position import CopyPosition, CopyProgress, CopyVersion
from ._reader import Pieces, TableReader, end_task

__all__ = ["CopyMeter", "Snapshot"]

#: How often the progress of a copy is recorded as an event, in seconds.
REPORT_EVERY = 10.0
#: Chunks that are read at the same time, each over a connection of its own.
READERS = 2

T = TypeVar("T")


class CopyMeter:
    """Counts the rows of a copy, and emits its events."""

    def __init__(self, emit: Callable[[str, str], None], clock: Clock) -> None:
        self._emit = emit
        self._now = clock.monotonic
        #: The table, once the copy has begun.
        self.name = ""
        self._rows = self._estimated = 0
        self._ended: float | None = None
        self._began = self._reported = self._now()

    def begin(self, name: str, estimated: int, how: str) -> None:
        """Begin a copy."""
        self.name, self._estimated, self._rows, self._ended = name, estimated, 0, None
        self._began = self._reported = self._now()
        self._emit("snapshot_started", f"{name}, about {estimated:,} rows, {how}")

    @property
    def running(self) -> bool:
        """Whether a copy has begun, and not ended."""
        return bool(self.name) and self._ended is None

    def count(self, rows: int) -> None:
        """Count rows."""
        self._rows += rows
        if self._now() - self._reported > REPORT_EVERY:
            self._reported = self._now()
            self._emit("snapshot_progress", f"{self.name}, {self.progress}")

    def end(self) -> None:
        """Record that the copy is complete."""
        self._ended = self._now()
        self._emit("snapshot_finished", f"{self.name}, {self.progress}")

    @property
    def progress(self) -> CopyProgress:
        """How much is copied."""
        seconds = (self._ended or self._now()) - self._began
        return CopyProgress(self._rows, self._estimated, seconds, self._ended is not None)


class Snapshot:
    """The rows of a table: `async with pg.snapshot("orders") as snapshot`.

    Iterate once, and inside of the block: over the snapshot for rows, over `chunks()` for lists of
    rows, or over `blocks()` for the bytes of COPY. The table is read in chunks by ranges of its
    primary key, each in a short transaction with a snapshot of its own;
    `pg.follow(…, start=snapshot.position)` continues with the changes, and nothing is missing or
    doubled. After a failure of the connection, a chunk is read again.
    """

    def __init__(
        self,
        reader: TableReader,
        meter: CopyMeter,
        *,
        consistent: bool,
        start: CopyPosition | None,
    ) -> None:
        self._reader = reader
        self._meter = meter
        self._consistent = consistent
        self._start = start
        self._state = CopyState() if start is None else start.state
        self._version = CopyVersion() if start is None else start.version
        # Queried first: after a failover in between, the position is one of the lost timeline.
        self._history: History | None = None
        self._lsn = Lsn(0)
        self._reading: deque[asyncio.Task[Any]] = deque()
        # Whether the block of `async with` runs; what is iterated over, and its next rows.
        self._entered = False
        self._source: Any = None
        self._rows: list[Row] = []

    async def __aenter__(self) -> Self:
        start = self._start
        self._history = await self._reader.history()
        if start is None:
            self._lsn = await self._reader.begin()
            self._version = self._reader.table.version
        else:
            self._lsn = start.position.lsn
            table = await self._reader.describe()
            same = table.version[:2] == self._version[:2]
            if not same or self._history != start.position.history:
                raise PostgresError(
                    f"the snapshot of {table.qualified} cannot be continued: the table was "
                    "altered, where= or columns= differ from those at its start, or the database "
                    "was restored or replaced; start a new snapshot"
                )
        how = "with one snapshot" if self.one_snapshot else "in chunks"
        self._meter.begin(self._reader.table.qualified, self._reader.table.estimated, how)
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        self._rows.clear()
        await self._cancel()
        await self._close()

    @property
    def one_snapshot(self) -> bool:
        """Whether one transaction is open while all rows are read, which holds back vacuum.

        With `consistent=True`, and for a table without a primary key.
        """
        return self._consistent or not self._reader.table.key

    @property
    def position(self) -> CopyPosition:
        """The last finished chunk: pass it as `start=` to `snapshot()` or `follow()`.

        The rows after it are delivered again, as they are then. A row of them that was delivered
        before may be deleted by then: to discard no rows, iterate over `chunks()`.
        """
        if self._history is None:
            raise PostgresError(f"{self!r} has no position yet: read it inside of `async with`")
        return CopyPosition(Position(self._history, self._lsn), self._state, self._version)

    @property
    def progress(self) -> CopyProgress:
        """How much is copied, and how fast."""
        return self._meter.progress

    async def __aiter__(self) -> AsyncGenerator[Row, None]:
        """Yield the rows, as dicts."""
        async with aclosing(self._pieces(self._reader.rows)) as found:
            async for results, chunk in found:
                for result in results:
                    for rows in self._reader.load(result):
                        self._rows = rows
                        self._meter.count(len(rows))
                        for row in rows:
                            yield row
                        self._check()
                        await asyncio.sleep(0)
                self._finished(chunk)

    async def chunks(self) -> AsyncGenerator[list[Row], None]:
        """Yield the rows of one chunk after the other; `position` is then the end of that chunk.

        Store it with the rows: a snapshot that continues there delivers none of them again. The
        last list may be empty. With `one_snapshot`, the lists are parts of the only chunk.
        """
        async with aclosing(self._pieces(self._reader.rows)) as found:
            async for results, chunk in found:
                rows: list[Row] = []
                for result in results:
                    for some in self._reader.load(result):
                        rows += some
                        await asyncio.sleep(0)
                self._meter.count(len(rows))
                self._finished(chunk)
                yield rows

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the rows as bytes, in the text format of COPY."""
        self._reader.as_bytes = True
        async with aclosing(self._pieces(self._reader.blocks)) as found:
            async for blocks, chunk in found:
                for block in blocks:
                    self._meter.count(block.count(b"\n"))
                    yield block
                    self._check()
                    await asyncio.sleep(0)  # the next chunks are received meanwhile
                self._finished(chunk)

    def _finished(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._state = self._state.copied(chunk)

    def _check(self) -> None:
        if not self._entered:
            raise PostgresError(
                f"{self!r} is not open, so its rows cannot be read: iterate inside of `async with`"
            )

    async def _pieces(self, read: Pieces[T]) -> AsyncGenerator[tuple[list[T], Chunk | None], None]:
        """Yield the pieces of the chunks, and with the last ones of a chunk, the chunk."""
        self._check()
        if self._source is not None:
            raise PostgresError(f"{self!r} can be iterated over once: begin a new snapshot")
        self._source = self._from_one(read) if self.one_snapshot else self._from_each(read)
        try:
            async for pieces in self._source:
                self._check()
                yield pieces
                pieces[0].clear()  # before the next ones are awaited
        finally:
            await self._close()
        self._check()
        self._meter.end()

    async def _from_one(
        self, read: Pieces[T]
    ) -> AsyncGenerator[tuple[list[T], Chunk | None], None]:
        """Read all rows with one snapshot."""
        if self._state.complete:
            return
        try:
            async with (
                self._reader.view() as view,
                aclosing(read(view, self._state.after, None)) as pieces,
            ):
                async for piece in pieces:
                    yield [piece], None
            yield [], Chunk(None, view.sight, view.limit)
        except psycopg.Error as error:
            raise self._reader.failure(error) from error

    async def _from_each(self, read: Pieces[T]) -> AsyncGenerator[tuple[list[T], Chunk], None]:
        """Read chunks with snapshots of their own, some at the same time; yield them in order."""
        after, more = self._state.after, not self._state.complete
        try:
            while more or self._reading:
                while more and len(self._reading) < READERS:
                    through = await self._reader.bound(after)
                    self._reading.append(start_task(self._reader.read(read, after, through)))
                    after, more = through, through is not None
                chunk = await self._reading[0]
                self._reading.popleft()
                yield chunk
                del chunk
        finally:
            await self._cancel()

    async def _close(self) -> None:
        # After `break`, the event loop closes the iterator while the block of `async with` ends.
        if self._source is not None and not self._source.ag_running:
            await self._source.aclose()

    async def _cancel(self) -> None:
        while self._reading:
            await end_task(self._reading.pop())

    def __repr__(self) -> str:
        return f"<Snapshot of {self._reader.name}: {self.progress}>"
