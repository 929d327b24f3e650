"""The outbox without a table: the last events of the change stream, in the memory of this process.

An event is a transactional message of pg_logical_emit_message(). Its position is the LSN of the end
of its commit, and its number within the transaction: both make one number, its id.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

from .._errors import ConfigurationError, PostgresError
from .._lsn import Lsn
from .._position import History
from ..consume import Reset, Transaction
from ._cursor import Cursor, OutboxState
from ._publish import encoded
from ._reader import OutboxEvent, Page, Reader
from ._stream_wakes import StreamWakes

if TYPE_CHECKING:
    from .._postgres import Postgres

log = logging.getLogger("moored.postgres")

#: The size of the payloads that are kept at most, in characters.
RING_SIZE = 64 << 20
#: Seconds until the stream must have delivered a message that was committed.
ARRIVES = 10.0
#: After so many changes of a transaction, which may have a million, other tasks run.
PAUSE_EVERY = 1000


class StreamRing(StreamWakes):
    """The last events, which the stream adds and wakes for, and pages of them."""

    def __init__(self, pg: Postgres, prefix: str, limit: int) -> None:
        super().__init__(pg)
        if not pg.settings.messages:
            raise ConfigurationError(
                "an outbox without a table needs the messages of the stream: use "
                "Postgres(…, messages=True)"
            )
        self._reader = Reader(pg.outbox_pool, prefix)
        self._prefix = prefix
        self._limit = limit
        self._kept: deque[OutboxEvent] = deque()
        self._size = 0
        # Everything after the floor, and up to the end, is kept; None before the stream has begun.
        self._history: History | None = None
        self._floor = _id(0)
        self._end = 0
        self._arrived = asyncio.Event()

    # -- the stream ----------------------------------------------------------------------------

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[object]]:
        """Follow the stream as a consumer, which is dropped at the end, so that no WAL is kept."""
        name = f"wake-ups of {channel}"
        try:
            async with aclosing(self._woken(name)) as events:
                yield events
        finally:
            if self._pg.is_open:
                await self._pg.drop_consumer(name)

    async def _woken(self, name: str) -> AsyncGenerator[object, None]:
        async with self._pg.changes(name) as changes:
            await self._begin()
            async for txn in changes:
                if isinstance(txn, Reset):
                    await self._begin()
                    yield txn
                    continue
                if await self._receive(txn):
                    yield txn
                await txn.ack()

    async def _begin(self) -> None:
        """Forget all events: later ones follow the next transaction, which this commits."""
        self._kept.clear()
        self._size = 0
        self._history = None
        # Before, the slot may not exist, and the stream of another instance has the message.
        await self._pg.wait_until_active()
        await self._mark()

    async def _mark(self) -> int:
        """Commit a message without an event; return an LSN that the stream passes with it."""
        query = "select pg_logical_emit_message(true, %(prefix)s, '')::text"
        ((lsn,),) = await self._reader.run(query, prefix=self._prefix)
        return Lsn.parse(lsn)

    async def _receive(self, txn: Transaction) -> bool:
        """Keep the events of a transaction in place of the oldest; return whether it has any."""
        history, end = txn.position.history, int(txn.position.lsn)
        if self._history is not None and end <= self._end:
            return False
        found = [event async for event in self._events(txn, history, end)]
        # From here on without a pause: a reader sees all events of a transaction, or none.
        if self._history is None:
            self._history, self._floor = history, _id(end)
        self._kept += found
        self._size += sum(len(event.payload) for event in found)
        while len(self._kept) > self._limit or (self._size > RING_SIZE and len(self._kept) > 1):
            oldest = self._kept.popleft()
            self._size -= len(oldest.payload)
            self._floor = oldest.id
        self._end = end
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()
        return bool(found)

    async def _events(
        self, txn: Transaction, history: History, end: int
    ) -> AsyncGenerator[OutboxEvent, None]:
        # A message that is not transactional has no place in the order.
        if txn.xid == 0 or not txn._committed.emits():
            return
        number = 0
        for looked_at, each in enumerate(txn._committed.emitted(), 1):
            if not looked_at % PAUSE_EVERY:
                await asyncio.sleep(0)
            if each is None or each.prefix != self._prefix or not each.content:
                continue
            number += 1
            try:
                read = json.loads(each.content)
                channel, tenant = str(read["channel"]), read.get("tenant")
                payload = encoded(read["payload"])
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                log.warning(
                    "a message %r of the WAL is not an event, and is left out: it must be a JSON "
                    "object with channel, payload and, if it has one, tenant (%r)",
                    self._prefix,
                    error,
                )
                continue
            cursor = Cursor(history, _id(end, number))
            yield OutboxEvent(cursor, tenant, channel, payload, txn.commit_time)

    # -- pages ---------------------------------------------------------------------------------

    async def page(
        self,
        after: Cursor | None,
        limit: int,
        channels: Sequence[str] = (),
        tenant: str | None = None,
    ) -> Page:
        """Return the kept events after a cursor; with None, only the state."""
        await self._reach(0)
        if after is not None and after.id > _id(self._end + 1):
            # Another process has read further, or the server was restored: a later commit shows it.
            await self._reach(await self._mark())
        assert self._history is not None
        end = _id(self._end + 1)
        state = OutboxState(self._history, final=end, highest=end, floor=self._floor)
        if after is None:
            return Page(state, [], complete=True)
        newer = takewhile(lambda event: event.id > after.id, reversed(self._kept))
        found = [
            event
            for event in newer
            if (not channels or event.channel in channels) and tenant in (None, event.tenant)
        ]
        return Page(state, found[: -limit - 1 : -1], complete=len(found) <= limit)

    async def _reach(self, lsn: int) -> None:
        """Wait until the stream has begun, and has passed an LSN."""
        try:
            async with asyncio.timeout(ARRIVES):
                while self._history is None or self._end < lsn:
                    await self._arrived.wait()
        except TimeoutError:
            raise PostgresError(
                f"the change stream has delivered nothing for {ARRIVES:g} s, so the last events are"
                " unknown: the stream is not active, or another process with this stream_id has it"
            ) from None


def _id(end: int, number: int = 0) -> int:
    """Return the id of an event: the LSN of the end of its commit comes first in the order."""
    return end << 32 | number
