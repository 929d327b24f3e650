"""The outbox's own statements: read pages of events, and store the cursors of consumers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple, Protocol

import psycopg
from psycopg import AsyncClientCursor, sql

from moored.kernel import raise_if_cancelled

from .._errors import ConfigurationError, PostgresError
from .._position import History
from ._cursor import Cursor, OutboxState
from ._ddl import VERSION

if TYPE_CHECKING:
    from ._consumer import OutboxConsumer

#: The payloads of one page have about so many bytes at most; a larger one has a page of its own.
PAGE_BYTES = 4 << 20

# One message, and so one round trip. Under "repeatable read" the snapshot would be older than the
# locks of the SELECT, which could then miss both a dropped partition and the new floor.
_READ = """
set transaction isolation level read committed;
with server as materialized (
    select v.version, v.floor_xid::text, v.floor_id,
        (select system_identifier::text from pg_control_system()) as system_id,
        ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int as timeline,
        pg_snapshot_xmin(pg_current_snapshot())::text as xmin,
        pg_snapshot_xmax(pg_current_snapshot())::text as xmax,
        exists (
            select from {schema}.outbox o
            where o.xid = %(xid)s::xid8 and o.id = %(id)s
                and (extract(epoch from o.at) * 1000000)::bigint = %(mark)s
        ) as found,
        coalesce((select o.xid from {schema}.outbox o order by o.xid desc, o.id desc limit 1)
            >= pg_snapshot_xmin(pg_current_snapshot()), false) as held
    from {schema}.outbox_state v
)
select server.*, e.total, e.xid::text, e.id, e.tenant, e.channel, e.payload, e.at,
    (extract(epoch from e.at) * 1000000)::bigint
from server
left join lateral (
    select p.*, count(*) over () as total,
        sum(octet_length(p.payload)) over (order by p.xid, p.id) - octet_length(p.payload) as size
    from (
        select * from {schema}.outbox o
        where (o.xid, o.id) > (%(xid)s::xid8, %(id)s)
            and o.xid < pg_snapshot_xmin(pg_current_snapshot())
            and (%(channels)s::text[] is null or o.channel = any(%(channels)s::text[]))
            and (%(tenant)s::text is null or o.tenant = %(tenant)s::text)
        order by o.xid, o.id limit %(limit)s
    ) as p
) as e on e.size < %(bytes)s
order by e.xid, e.id
"""
_ATTACH = """
insert into {schema}.outbox_cursors (consumer, cursor) values (%(name)s, %(cursor)s)
on conflict (consumer) do update
set cursor = case when %(force)s then excluded.cursor else outbox_cursors.cursor end
returning cursor
"""
# The row is locked while a transaction of the caller with an acknowledgement is open, and that may
# wait for the next event.
_STORE = """
set local lock_timeout = '1s';
select {schema}.outbox_store(%(name)s, %(old)s, %(new)s)
"""

#: Raised by `outbox_store`.
_MOVED = "MO001"
#: The table, the schema, the function or the column does not exist.
_MISSING = ("42P01", "3F000", "42883", "42703")


class PsycopgPool(Protocol):
    """A pool of psycopg connections: of the reservoir, of psycopg_pool, or a `Postgres`."""

    def connection(self) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        """Check out a connection, whose transaction is committed at the end."""
        ...


class ConsumerReplaced(PostgresError):
    """The stored cursor is not where this consumer left it: attach the consumer again.

    Another process consumes under the same name, or a transaction with an acknowledgement was
    rolled back.
    """


@dataclass(slots=True, eq=False, repr=False)
class OutboxEvent:
    """A published event; `ack()` it once its effect is durable."""

    _cursor: Cursor
    tenant: str | None
    channel: str
    #: As it was published; JSON, unless a str was published.
    payload: str
    #: The time of the insertion, by the server's clock; the order is that of `xid` and `id`.
    at: datetime
    _consumer: OutboxConsumer | None = None

    @property
    def xid(self) -> int:
        """The ID of the transaction that published it; without a table, the LSN of its commit."""
        return self._cursor.xid

    @property
    def id(self) -> int:
        """The number of the event; numbers have gaps, and are not in order of the commits.

        Without a table, it is the number within the transaction.
        """
        return self._cursor.id

    @property
    def cursor(self) -> str:
        """The position after this event: store it with the effect, and pass it as `start` later."""
        return str(self._cursor)

    def json(self) -> Any:
        """Return the payload, decoded from JSON."""
        return json.loads(self.payload)

    async def ack(self, conn: Any = None) -> None:
        """Acknowledge the event: the consumer does not get it again.

        With a connection (psycopg, asyncpg or SQLAlchemy, as for `Outbox.publish`), the cursor is
        stored within its transaction. If the effect is written in the same transaction, it is made
        once: both are committed, or neither. All earlier events must be acknowledged before.

        Without one, the cursor is stored soon: at most a tenth of a second later if events flow, at
        the latest when the consumer is closed.
        """
        if self._consumer is None:
            raise PostgresError("only an event of Outbox.consume() can be acknowledged")
        await self._consumer._acknowledge(self, conn)

    def __repr__(self) -> str:
        tenant = "" if self.tenant is None else f" of {self.tenant!r}"
        return f"<OutboxEvent {self.xid}/{self.id} in {self.channel!r}{tenant}>"


class Page(NamedTuple):
    """The events after a cursor, and the state of the outbox when they were read."""

    server: OutboxState
    events: list[OutboxEvent]
    #: Whether there were no further events that could be read.
    complete: bool


class Reader:
    """Runs the statements on pooled connections."""

    def __init__(self, connections: PsycopgPool, schema: str) -> None:
        self._connections = connections
        self.schema = schema
        self._schema = sql.Identifier(schema)

    async def page(
        self,
        after: Cursor | None,
        limit: int,
        channels: Sequence[str] = (),
        tenant: str | None = None,
    ) -> Page:
        """Read the events after a cursor that can be read now; with None, only the state."""
        cursor = after or Cursor(History("", 0), 0)
        rows = await self.run(
            _READ,
            xid=str(cursor.xid),
            id=cursor.id,
            mark=cursor.mark,
            channels=list(channels) or None,
            tenant=tenant,
            limit=0 if after is None else limit,
            bytes=PAGE_BYTES,
        )
        server = _server(rows[0][:9])
        events = [_event(server.history, row[10:]) for row in rows if row[9] is not None]
        total = rows[0][9] or 0
        return Page(server, events, total < limit and len(events) == total)

    async def attach(self, name: str, cursor: Cursor, *, force: bool) -> Cursor:
        """Return the stored cursor of a consumer; store this one if there is none, or if forced."""
        rows = await self.run(_ATTACH, name=name, cursor=str(cursor), force=force)
        return Cursor.parse(rows[0][0])

    async def store(self, name: str, old: Cursor, new: Cursor) -> None:
        """Store a consumer's cursor; raise `ConsumerReplaced` if it is not the old one."""
        await self.run(_STORE, name=name, old=str(old), new=str(new))

    async def run(self, query: LiteralString | sql.SQL, **values: Any) -> list[Any]:
        """Run statements on a connection of the pool; return the rows of the last one."""
        text = query if isinstance(query, sql.SQL) else sql.SQL(query).format(schema=self._schema)
        try:
            async with (
                self._connections.connection() as conn,
                AsyncClientCursor(conn) as cursor,
            ):
                await cursor.execute(text, values or None)
                while cursor.nextset():
                    pass
                return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise_if_cancelled(error)
            raise translated(error) from error


def translated(error: Exception) -> Exception:
    """Return the error of this package for an error of a driver; the error itself if none fits."""
    state = getattr(error, "sqlstate", None) or getattr(
        getattr(error, "orig", None), "sqlstate", None
    )
    if state == _MOVED:
        return ConsumerReplaced(str(error).partition("\n")[0])
    if state in _MISSING:
        return ConfigurationError(
            f"the outbox is not installed in this database ({str(error).partition(chr(10))[0]}): "
            "run `moored outbox install`, or the statements that `moored outbox sql` prints"
        )
    return error


def _server(row: Sequence[Any]) -> OutboxState:
    version, floor_xid, floor_id, system_id, timeline, xmin, xmax, found, held = row
    if version != VERSION:
        raise ConfigurationError(
            f"the outbox in the database has version {version}, and this program needs {VERSION}: "
            + ("run `moored outbox install`" if version < VERSION else "update this program")
        )
    floor = (int(floor_xid), floor_id)
    return OutboxState(History(system_id, timeline), int(xmin), int(xmax), floor, found, held)


def _event(history: History, row: Sequence[Any]) -> OutboxEvent:
    xid, id_, tenant, channel, payload, at, mark = row
    return OutboxEvent(Cursor(history, int(xid), id_, mark), tenant, channel, payload, at)
