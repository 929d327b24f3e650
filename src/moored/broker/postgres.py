"""The outbox, the listener and the change stream of a Postgres as sources of a broker.

::

    async with Outbox(pool, listener=listener) as outbox:
        events = OutboxEvents(outbox)
        async with Broker(events, channels=["orders"]) as broker:
            ...

An event of the outbox has an id that every node knows, so a client may resume at any of them. The
others have none: what a client missed is in the memory of its node, or is lost, and then the client
gets a reset.

Clients do not see what a cursor says about the server: in the id of an event, a hash stands for the
system identifier and the timeline. It needs no key, so all nodes have the same ids, also after a
restart, and a system identifier has too many values to be found by its hash.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

from ._events import HistoryLost, SourceEvent, SourceGap

__all__ = ["ChangeEvents", "ListenerEvents", "OutboxEvents"]

#: The order of an event, and its id.
Position = tuple[int, str]


class OutboxLike(Protocol):
    """What is used of a `moored.postgres.Outbox`."""

    @property
    def delayed(self) -> str: ...

    def place(self, cursor: str) -> int: ...

    def tail(self, after: str | None = None) -> AsyncIterator[Any]: ...

    async def read(
        self,
        after: str | None = None,
        *,
        limit: int = 500,
        channels: Sequence[str] = (),
        tenant: str | None = None,
    ) -> Any: ...


class ListenerLike(Protocol):
    """What is used of a `moored.postgres.Listener`."""

    def subscribe(self, *channels: str) -> AbstractAsyncContextManager[AsyncIterator[Any]]: ...


class PostgresLike(Protocol):
    """What is used of a `moored.postgres.Postgres`."""

    def changes(
        self, consumer: str, *, tables: tuple[str, ...]
    ) -> AbstractAsyncContextManager[AsyncIterator[Any]]: ...

    async def wait_until_published(self, *tables: str) -> None: ...


class OutboxEvents:
    """The events of an outbox, as a source and as its history."""

    def __init__(self, outbox: OutboxLike) -> None:
        self._outbox = outbox
        self._cursor: str | None = None
        # The system identifier and timeline of the server, as they begin a cursor.
        self._history: str | None = None

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap | None]:
        """Yield the events from the first call on; after an error, from the last one on."""
        if self._cursor is not None:
            await self._outbox.read(self._cursor, limit=1)
            yield None  # the database answers
        async for batch in self._outbox.tail(self._cursor):
            if self._cursor is None:
                yield SourceGap("the source has begun", self._id(batch.cursor))
            elif batch.reset is not None:
                yield SourceGap(batch.reset.reason, self._id(batch.cursor))
            for event in batch.events:
                self._cursor = event.cursor
                yield self._event(event)
            self._cursor = batch.cursor

    @property
    def delayed(self) -> str:
        """Why events come late: a transaction holds them back; empty if none does."""
        return self._outbox.delayed

    def position(self, id: str) -> Position:
        """Return the position of an id."""
        _, _, place = id.partition("-")
        return self._outbox.place(f"0-0-{place}"), id

    async def read(
        self, after: Position, tenant: str, channels: frozenset[str] | None, limit: int
    ) -> list[SourceEvent]:
        """Return events of the tenant after a position."""
        history, _, place = after[1].partition("-")
        if self._history is None or _hashed(self._history) != history:
            self._id((await self._outbox.read(limit=1)).cursor)
        if self._history is None or _hashed(self._history) != history:
            raise HistoryLost("the event id is of another database, or of before it was restored")
        cursor = f"{self._history}-{place}"
        batch = await self._outbox.read(
            cursor, limit=limit, channels=sorted(channels or ()), tenant=tenant
        )
        if batch.reset is not None:
            raise HistoryLost(batch.reset.reason)
        return [*map(self._event, batch.events)]

    def _event(self, found: Any) -> SourceEvent:
        id = self._id(found.cursor)
        # The column decides: an event without a tenant has none, whatever its payload names.
        return SourceEvent(found.channel, found.payload, found.tenant or "", id, self.position(id))

    def _id(self, cursor: str) -> str:
        system, timeline, place = cursor.split("-", 2)
        self._history = f"{system}-{timeline}"
        return f"{_hashed(self._history)}-{place}"


@lru_cache(maxsize=16)
def _hashed(history: str) -> str:
    return blake2b(history.encode(), digest_size=8).hexdigest()


class ListenerEvents:
    """The notifications of a listener, as a source.

    :param channels: the channels to listen to.
    """

    def __init__(self, listener: ListenerLike, channels: Sequence[str]) -> None:
        self._listener = listener
        self._channels = channels

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        """Yield the notifications, and a gap where some may be missing."""
        async with self._listener.subscribe(*self._channels) as events:
            yield SourceGap("the source has begun")
            async for event in events:
                if hasattr(event, "payload"):
                    yield SourceEvent(event.channel, event.payload)
                else:
                    yield SourceGap(event.reason)


class ChangeEvents:
    """The changes of tables, as a source; the channel of an event is the name of its table.

    A payload is a JSON object with `op`, `table`, `old` and `new`. An update that moves a row to
    another tenant is a `delete` for the old one and an `insert` for the new one; a TRUNCATE is a
    gap. A transaction is acknowledged when all its changes were handed on.

    A `delete` has a tenant only if the replica identity of the table includes the tenant column.

    :param consumer: the name under which acknowledgements are stored.
    :param tables: the tables to follow, as of `Postgres.changes`.
    :param tenant_column: the column of the tables that names the tenant.
    """

    def __init__(
        self,
        pg: PostgresLike,
        consumer: str,
        tables: Sequence[str],
        *,
        tenant_column: str = "org_id",
    ) -> None:
        self._pg = pg
        self._consumer = consumer
        self._tables = tuple(tables)
        self._tenant_column = tenant_column

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        """Yield the changes in the order of the commits."""
        async with self._pg.changes(self._consumer, tables=self._tables) as transactions:
            # Earlier changes are not received.
            await self._pg.wait_until_published(*self._tables)
            yield SourceGap("the source has begun")
            async for transaction in transactions:
                if not hasattr(transaction, "ack"):
                    yield SourceGap(transaction.reason)
                    continue
                async for change in transaction:  # it may have a million
                    for item in self._items(change):
                        yield item
                await transaction.ack()

    def _items(self, change: Any) -> Iterator[SourceEvent | SourceGap]:
        old, new, column = change.old, change.new, self._tenant_column
        if change.kind == "truncate":
            yield SourceGap(f"the table {change.table} was truncated")
        elif old and new and old.get(column) != new.get(column):
            yield self._event("delete", change.table, old, None)
            yield self._event("insert", change.table, None, new)
        else:
            yield self._event(change.kind, change.table, old, new)

    def _event(self, op: str, table: str, old: Any, new: Any) -> SourceEvent:
        body = {"op": op, "table": table, "old": old and dict(old), "new": new and dict(new)}
        tenant = (new or old or {}).get(self._tenant_column)
        payload = json.dumps(body, default=str)
        return SourceEvent(table, payload, "" if tenant is None else str(tenant))
