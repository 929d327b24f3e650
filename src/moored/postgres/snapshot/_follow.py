"""`Postgres.follow()`: the rows of a table, then its changes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, NamedTuple, Self

from moored.kernel import start_task

from .._errors import PostgresError
from .._lsn import Lsn
from .._position import Resume
from ..consume import Changes, Hub, Reset, StateStore, Transaction, stored
from ..decode import Row
from ._delivery import JoinedTransaction, Rows
from ._follow_core import FollowCore, SavedCopy, Ticket
from ._join import Chunk, CopyState
from ._joining import check_columns, joined
from ._position import CopyPosition, CopyProgress, CopyVersion
from ._reader import TableReader, TransactionLost, end_task
from ._snapshot import CopyMeter
from ._source import ColumnsChanged

__all__ = ["Follow", "SavedCopies"]

log = logging.getLogger("moored.postgres")

#: How often a consumer whose table is not published yet looks whether it was closed, in seconds.
LOOK_EVERY = 1.0

Item = Rows | Transaction | Reset
_TRUNCATED = "the table was truncated while it was copied"


class CopiedRows(NamedTuple):
    """The rows of a chunk."""

    rows: list[Row]
    chunk: Chunk


class SavedCopies:
    """The states of copies in the state file, by the names of their consumers."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def load(self, consumer: str) -> SavedCopy | None:
        """Return the state of a copy; None if there is none."""
        text = self._store.copy(consumer)
        if text is None:
            return None
        version, acked, *chunks = json.loads(text)
        return SavedCopy(CopyVersion.parse(version), acked, CopyState.load(chunks))

    def save(self, consumer: str, saved: SavedCopy) -> None:
        """Store the state of a copy, unless its consumer was dropped."""
        data = [str(saved.version), saved.acked, *saved.state.dump()]
        self._store.save_copy(consumer, json.dumps(data, separators=(",", ":")))


class Follow:
    """The rows of a table, and then its changes: `async for item in pg.follow("orders", …)`.

    Items are `Rows`, transactions, and a `Reset` whenever the copy begins again: then everything
    that was delivered before is void. Acknowledge rows and transactions in the order in which they
    were delivered. Iteration ends when this object or its `Postgres` is closed. A cancelled call
    loses no item, and several tasks may share one follower.
    """

    def __init__(
        self,
        changes: Changes,
        hub: Hub,
        saved: SavedCopies,
        reader: TableReader,
        meter: CopyMeter,
        *,
        where: bool,
        columns: bool,
        begin_again: bool,
        start: CopyPosition | Resume | None,
    ) -> None:
        self._changes = changes
        self._hub = hub
        self._saved = saved
        self._reader = reader
        #: That of the copy: it is replaced with a reset.
        self._attachment = changes._attachment
        reader.was_reset = lambda: changes._attachment is not self._attachment
        self._meter = meter
        self._where = where
        self._columns = columns
        self._begins_again = begin_again
        self._core = FollowCore(start)
        self.name = changes.name
        self._saving = asyncio.Lock()
        self._pending: Transaction | Reset | None = None
        self._streaming: asyncio.Task[Any] | None = None
        self._copying: asyncio.Task[Any] | None = None
        self._items: Any = self._deliver()
        # The task that waits for the next item.
        self._coming: asyncio.Task[Item | None] | None = None
        self._turn = asyncio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        """Return the next rows or the next transaction, or a `Reset`."""
        async with self._turn:
            if (coming := self._coming) is None:
                if (txn := await self._unjoined()) is not None:
                    return txn
                # In a task: if the caller is cancelled, the next call returns the item.
                coming = self._coming = start_task(self._item())
            await asyncio.wait([coming])
            item = None if coming.cancelled() else coming.result()
            if item is None:
                raise StopAsyncIteration
            self._coming = None
            return item

    async def _unjoined(self) -> Transaction | None:
        """Return the next transaction if it needs no task, which takes longer than the rest."""
        if not self._complete or self._streaming is not None or self._pending is not None:
            return None
        found = self._pending = await anext(self._changes)
        whole = self._whole(found) if isinstance(found, Transaction) else None
        if whole is not None:
            self._pending = None
        return whole

    async def _item(self) -> Item | None:
        """Return the next item; None after the last one."""
        item: Item | None = None
        try:
            item = await anext(self._items, None)
        finally:
            if item is None:
                await self._end_reading()
        return item

    async def aclose(self) -> None:
        """Detach the consumer and end its iteration; its acknowledgements stay stored."""
        await self._changes.aclose()
        await self._end_tasks()
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def progress(self) -> CopyProgress:
        """How much of the table is copied, and how fast."""
        return self._meter.progress._replace(complete=self._complete)

    @property
    def _complete(self) -> bool:
        return self._core.state.complete

    # -- the items -------------------------------------------------------------------------------

    async def _deliver(self) -> AsyncGenerator[Item, None]:
        try:
            await self._load()
            while True:
                txn = None
                try:
                    found = await self._next()
                    if isinstance(found, Transaction):
                        txn = found
                    item = await self._made(found)
                except TransactionLost:
                    continue  # the `Reset` follows
                except ColumnsChanged as error:
                    if await self._is_reset():
                        continue
                    item = Reset(str(error))
                if isinstance(item, Reset):
                    await self._void()
                yield item
                if isinstance(item, Reset):
                    if not self._begins_again:
                        return
                    await self._published()
                    await self._begin()
                    if txn is not None:
                        await txn.ack()  # all later snapshots see it
        except StopAsyncIteration:
            return
        except PostgresError:
            if self._changes._closed and self._changes._error is None:
                return
            raise

    async def _is_reset(self) -> bool:
        """Return whether the consumer is reset because of the table as it is now.

        Both the copy and the check of the published tables find columns that were changed: the
        consumer must not begin again twice.
        """
        if not self._reader.was_reset():
            await self._published(self._hub.check_tables())
        if not self._reader.was_reset():
            return False
        if isinstance(self._pending, Transaction):
            self._pending = None  # from before the reset
        return True

    async def _made(self, found: Transaction | Reset | CopiedRows) -> Item:
        if isinstance(found, CopiedRows):
            return await self._chunk(*found)
        if isinstance(found, Reset):
            return found
        return await self._joined(found) or Reset(_TRUNCATED)

    async def _next(self) -> Transaction | Reset | CopiedRows:
        """Return the next chunk, or the next item of the stream that may be delivered."""
        while True:
            if self._changes._closed:
                raise self._changes._error or StopAsyncIteration
            pending = self._pending
            if isinstance(pending, Reset) or (
                pending is not None and self._core.state.ready(pending.xid, pending.position.lsn)
            ):
                self._pending = None
                return pending
            if pending is None and self._streaming is None:
                self._streaming = start_task(self._changes.__anext__())
            if self._copying is None and not self._complete:
                self._copying = start_task(self._copy())
            tasks = [each for each in (self._streaming, self._copying) if each is not None]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if (streaming := self._streaming) is not None and streaming.done():
                self._streaming = None
                self._pending = streaming.result()
            elif (copying := self._copying) is not None and copying.done():
                self._copying = None
                found: CopiedRows = copying.result()
                return found

    async def _copy(self) -> CopiedRows:
        after, again = self._core.state.after, self._core.again
        through = again.through if again else await self._reader.bound(after)
        results, chunk = await self._reader.read(self._reader.rows, after, through)
        rows: list[Row] = []
        for result in results:
            for some in self._reader.load(result):
                rows += some
                await asyncio.sleep(0)
        return CopiedRows(rows, chunk)

    async def _chunk(self, rows: list[Row], chunk: Chunk) -> Rows:
        self._core.copied(chunk)
        await self._save()  # before it is delivered
        if self._complete:
            self._meter.end()
        else:
            self._copying = start_task(self._copy())
        self._meter.count(len(rows))
        return Rows(self._reader.table.name, rows, self._position(), self._acknowledger())

    async def _joined(self, txn: Transaction) -> Transaction | None:
        """Return what is delivered of a transaction; None if the copy must begin again."""
        if (whole := self._whole(txn)) is not None:
            return whole
        if self._columns and not self._where:
            check_columns(self._reader, txn)
        self._core.lsn = txn.position.lsn
        changes, limit = await joined(
            self._reader, self._core.state, txn, where=self._where, columns=self._columns
        )
        if limit is not None:
            self._core.stretch(limit)
        if changes is None:
            return None
        return JoinedTransaction(txn, changes, self._position(), self._acknowledger())

    def _whole(self, txn: Transaction) -> Transaction | None:
        """Return a transaction of which no chunk contains any change; None for others."""
        if self._where or not self._core.state.settled(txn.position.lsn):
            return None
        columns = None
        if self._columns:
            check_columns(self._reader, txn)
            columns = self._reader.table.oid, self._reader.table.columns
        self._core.lsn = txn.position.lsn
        return JoinedTransaction(txn, None, self._position(), self._acknowledger(), columns)

    def _position(self) -> CopyPosition:
        assert self._hub.history is not None
        return self._core.position(self._hub.history, self._reader.table.version)

    # -- begin and continue ----------------------------------------------------------------------

    async def _load(self) -> None:
        """Wait until the table is published, and continue a copy, or begin one."""
        await self._published()
        saved = await stored(self._saved.load, self.name)
        if not self._core.load(saved, self._acknowledged()):
            await self._begin()
            return
        table = await self._reader.describe()
        reason = self._core.obstacle(table.version, keyed=bool(table.key))
        if reason is not None:
            self._pending = Reset(reason)
        elif self._complete:
            return
        self._meter.begin(table.qualified, table.estimated, "continued")

    async def _published(self, check: int = 0) -> None:
        """Wait until the table is published; as of this check, if one is given."""
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await self._hub.published.wait(
                        [self._reader.name],
                        self._hub.attached,
                        lambda: self._hub.is_ready(self.name, check),
                    )
                    return
            except TimeoutError:
                if self._changes._closed:
                    raise self._changes._error or StopAsyncIteration from None

    async def _void(self) -> None:
        await self._end_copying()
        self._core.void()

    async def _begin(self) -> None:
        self._attachment = self._changes._attachment
        await self._reader.begin()
        self._core.begin(self._acknowledged())
        await self._save()
        table = self._reader.table
        how = "in chunks" if table.key else "with one snapshot, because it has no primary key"
        self._meter.begin(table.qualified, table.estimated, how)

    def _acknowledged(self) -> Lsn:
        known = self._hub.consumers().get(self.name, {}).get("acknowledged")
        return Lsn(0) if known is None else Lsn.parse(str(known))

    # -- acknowledgements ------------------------------------------------------------------------

    def _acknowledger(self) -> Any:
        return partial(self._acknowledge, self._core.ticket())

    async def _acknowledge(self, ticket: Ticket) -> None:
        if self._core.acknowledge(ticket, partial(self._hub.stored, self.name)):
            await self._save()

    async def _save(self) -> None:
        async with self._saving:  # in the order of the calls
            if not self._hub.is_valid(self._changes._attachment):
                return  # it was dropped, or a follower of the same name has attached
            saved = self._core.saved(self._reader.table.version)
            await stored(self._saved.save, self.name, saved)

    # -- tasks -----------------------------------------------------------------------------------

    async def _end_copying(self) -> None:
        copying, self._copying = self._copying, None
        await end_task(copying)

    async def _end_tasks(self) -> None:
        coming, self._coming = self._coming, None
        await end_task(coming)
        await self._end_reading()

    async def _end_reading(self) -> None:
        await self._end_copying()
        streaming, self._streaming = self._streaming, None
        await end_task(streaming)

    def __repr__(self) -> str:
        state = "following" if self._complete else "copying"
        return f"<Follow of {self._reader.name} by {self.name!r}: {state}, {self.progress}>"
