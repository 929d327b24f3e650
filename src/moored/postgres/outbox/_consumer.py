"""A consumer: events in the total order, acknowledgements, and its stored cursor."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import psycopg

from moored.kernel import Backoff, Clock, MooredError, awaited, describe
from moored.reservoir import PoolClosed

from .._errors import PostgresError
from ..consume import Reset
from ._cursor import Cursor, OutboxState
from ._publish import run
from ._reader import ConsumerReplaced, OutboxEvent, Page, Reader, translated
from ._wakes import Wakes

log = logging.getLogger("moored.postgres")

#: Errors that a retry cannot mend, and, of the others, those after which a read is tried again.
FINAL = (PostgresError, PoolClosed)
TEMPORARY = (psycopg.Error, OSError, MooredError)
#: Events that are read at once.
PAGE = 500
#: Seconds between two stores of a cursor, and of the cursor of an idle consumer with a filter,
#: which has passed the events of others meanwhile.
STORE_EVERY, STORE_IDLE = 0.1, 60.0
#: Seconds that closing waits until the cursor is stored.
CLOSE = 3.0
#: The first and the longest wait for a transaction that holds events back, in seconds.
HELD = (0.005, 0.25)
#: The first and the longest wait after an error, in seconds.
RETRY = (0.1, 5.0)


class OutboxConsumer:
    """The events of one consumer: `async for event in events`, which never ends by itself.

    It yields an `OutboxEvent`, or a `Reset` if events may be missing. Leaving the loop and closing
    keeps the cursor: unacknowledged events are delivered again to the next consumer of this name.
    Two consumers of one name at a time get the same events; the second to store its cursor gets
    `ConsumerReplaced`.
    """

    def __init__(
        self,
        reader: Reader,
        wakes: Wakes,
        schema: str,
        name: str,
        channels: Sequence[str],
        tenant: str | None,
        start: str,
    ) -> None:
        self.name = name
        self.channels = tuple(channels)
        self.tenant = tenant
        self._reader = reader
        self._wakes = wakes
        self._store_call = f"{schema}.outbox_store({{}}, {{}}, {{}})"
        self._start = start if start in ("oldest", "now") else Cursor.parse(start)
        self._queue: deque[OutboxEvent | Reset] = deque()
        # The delivered events, and whether they are acknowledged; without the first ones that are.
        self._open: dict[Cursor, bool] = {}
        # Everything up to here was read; was acknowledged; and is stored in the database, of which
        # nothing is known after a reset: it may have been restored with another cursor.
        self._read: Cursor | None = None
        self._acked: Cursor
        self._stored: Cursor | None = None
        # Sent without an answer since the last store: one of them may be stored.
        self._unsure: set[Cursor] = set()
        self._stored_at = 0.0
        self._resetting = False
        self._closed = False
        self._reading = asyncio.Lock()
        self._storing = asyncio.Lock()
        self._retry = Backoff(*RETRY, jitter="half")
        self._held = Backoff(*HELD)
        #: Events delivered so far.
        self.delivered = 0

    async def __aenter__(self) -> Self:
        await self._attach()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutboxEvent | Reset:
        """Return the next event, or a `Reset`; wait for one."""
        async with self._reading:
            self._resetting = False
            while not self._queue:
                if self._closed:
                    raise StopAsyncIteration
                try:
                    await (self._attach() if self._read is None else self._fill())
                except FINAL:
                    if not self._closed:  # and its pool with it
                        raise
            item = self._queue.popleft()
            if isinstance(item, Reset):
                self._resetting = True
            else:
                self._open[item._cursor] = False
                self.delivered += 1
            return item

    async def aclose(self) -> None:
        """Store the acknowledgements and end the iteration; the cursor stays stored."""
        if self._closed:
            return
        self._closed = True
        self._wakes.wake()
        if self._read is not None and not self._resetting:
            with suppress(*TEMPORARY):
                async with asyncio.timeout(CLOSE):
                    await self._store()
                    await self._pass_others()

    # -- reading -------------------------------------------------------------------------------

    async def _attach(self) -> None:
        """Find the position; errors are raised, because a retry may never succeed."""
        server = (await self._reader.page(None, 0)).server
        chosen = self._start
        first = chosen if isinstance(chosen, Cursor) else self._first(server)
        forced = isinstance(chosen, Cursor)
        self._stored = await self._reader.attach(self.name, first, force=forced)
        self._read = self._acked = self._stored

    def _first(self, server: OutboxState) -> Cursor:
        return server.now() if self._start == "now" else server.oldest()

    async def _fill(self) -> None:
        """Read once; wait if there is nothing to read."""
        woken = self._wakes.next()
        assert self._read is not None
        try:
            page = await self._reader.page(self._read, PAGE, self.channels, self.tenant)
            reason = page.server.refuses(self._read)
            if reason is None:
                await self._store()
        except FINAL:
            raise
        except TEMPORARY as error:
            if self._retry.attempts == 0:
                log.warning("consumer %r waits for the database: %s", self.name, describe(error))
            await asyncio.sleep(self._retry.fail())
            return
        self._retry.succeed()
        if reason is not None:
            self._reset(reason, page.server)
        elif not self._take(page):
            if self._due(STORE_IDLE):
                await self._pass_others()
            await self._wakes.more(woken, self._held, page.server)

    def _take(self, page: Page) -> list[OutboxEvent]:
        """Queue the events of a page."""
        for event in page.events:
            event._consumer = self
        if page.events:
            self._held.succeed()
        self._queue.extend(page.events)
        assert self._read is not None
        self._read = page.server.after(self._read) if page.complete else page.events[-1]._cursor
        return page.events

    def _reset(self, reason: str, server: OutboxState) -> None:
        log.warning("consumer %r of the outbox is reset: %s", self.name, reason)
        self._open.clear()
        self._stored = None
        self._read = self._acked = self._first(server)
        self._queue.append(Reset(reason))

    # -- acknowledging -------------------------------------------------------------------------

    async def _acknowledge(self, event: OutboxEvent, conn: Any) -> None:
        cursor = event._cursor
        if conn is not None:
            await self._acknowledge_with(cursor, conn)
        elif self._open.get(cursor) is False:
            self._settle(cursor)
            if self._due(STORE_EVERY):
                await self._try_to_store()

    async def _acknowledge_with(self, cursor: Cursor, conn: Any) -> None:
        async with self._storing:
            if next(iter(self._open), None) != cursor:
                raise PostgresError(
                    f"the event at {cursor} cannot be acknowledged within a transaction: it was "
                    "acknowledged before, an earlier one was not, or the consumer was reset"
                )
            old = self._stored
            try:
                await awaited(run(conn, self._store_call, self.name, str(old), str(cursor)))
            except Exception as error:
                raise translated(error) from error
            self._stored = cursor
            self._settle(cursor)

    def _settle(self, cursor: Cursor) -> None:
        """Mark an event, and advance over the first ones that are marked."""
        self._open[cursor] = True
        while self._open and self._open[first := next(iter(self._open))]:
            del self._open[first]
            self._acked = first

    async def _pass_others(self) -> None:
        """While nothing is unacknowledged, pass the events that the filter leaves out.

        This fails while a transaction of the caller with an acknowledgement is open.
        """
        filtered = self.channels or self.tenant is not None
        if filtered and not self._open and not self._queue and self._read is not None:
            before, self._acked = self._acked, self._read
            try:
                await self._store()
            except TEMPORARY:
                self._acked = before

    def _due(self, seconds: float) -> bool:
        return Clock.current().monotonic() - self._stored_at >= seconds

    async def _try_to_store(self) -> None:
        """Store the cursor; without a connection, that is done before the next read."""
        try:
            await self._store()
        except ConsumerReplaced:
            # The cursor of a restored server is another one, too: then the next read is a reset.
            server = (await self._reader.page(self._read, 0)).server
            if self._read is None or server.refuses(self._read) is None:
                raise
        except FINAL:
            raise
        except TEMPORARY as error:
            log.info("the cursor of %r is stored later: %s", self.name, describe(error))

    async def _store(self) -> None:
        """Store the cursor, if it has changed."""
        async with self._storing:
            old, new = self._stored, self._acked
            if new == old:
                return
            self._stored_at = Clock.current().monotonic()
            try:
                if old is None:
                    await self._reader.attach(self.name, new, force=True)
                else:
                    await self._replace(old, new)
            except BaseException:
                self._unsure.add(new)
                raise
            self._stored = new
            self._unsure.clear()

    async def _replace(self, old: Cursor, new: Cursor) -> None:
        for each in (old, *self._unsure):
            try:
                return await self._reader.store(self.name, each, new)
            except ConsumerReplaced as error:
                replaced = error
        raise replaced

    @property
    def position(self) -> int:
        """The `id` of the last event that is acknowledged, as far as it is known; 0 if unknown."""
        return 0 if self._read is None else self._acked.id

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._open)} unacknowledged"
        return f"<OutboxConsumer {self.name!r}: {state}>"
