"""The outbox's own statements: read pages of events, and store the cursors of consumers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString, NamedTuple, Protocol

import psycopg
from psycopg import AsyncClientCursor, sql

from moored.kernel import raise_if_cancelled

from .._errors import ConfigurationError, PostgresError
from .._position import History
from ..server import uncancelled
from ._cursor import Cursor, OutboxState
from ._ddl import parts
from ._looks import READ_COMMITTED, SERVER, Looks, Server

if TYPE_CHECKING:
    from ._consumer import OutboxConsumer

#: Statements of the outbox, to be filled with its names, or as they are.
Statements = LiteralString | sql.SQL | sql.Composed

#: The payloads of one page have about so many bytes at most; a larger one has a page of its own.
PAGE_BYTES = 4 << 20
#: The largest id of the server; one that a client has made up may be larger.
_LARGEST = 2**63 - 1

# With "repeatable read", the snapshot would be that of an earlier statement of the transaction.
_READ = (
    READ_COMMITTED
    + "with server as materialized ("
    + SERVER
    + """,
        v.floor,
        exists (
            select from {schema}.outbox o where o.id = %(id)s
                and (extract(epoch from o.at) * 1000000)::bigint = %(mark)s
        ) as found,
        (select (extract(epoch from o.at) * 1000000)::bigint from {schema}.outbox o
         where o.id = %(final)s) as mark
    from {schema}.outbox_state v
)
select server.*, e.total, e.id, e.tenant, e.channel, e.payload, e.at,
    (extract(epoch from e.at) * 1000000)::bigint
from server
left join lateral (
    select p.*, count(*) over () as total,
        sum(octet_length(p.payload)) over (order by p.id) - octet_length(p.payload) as size
    from (
        select * from {schema}.outbox o
        where o.id > %(id)s and o.id <= %(final)s
            and (%(channels)s::text[] is null or o.channel = any(%(channels)s::text[]))
            and (%(tenant)s::text is null or o.tenant = %(tenant)s::text)
        order by o.id limit %(limit)s
    ) as p
) as e on e.size < %(bytes)s
order by e.id
"""
)
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
# Only at the server that was looked at: the pool may lead to another one by now.
_KEEP = (
    "with server as materialized ("
    + SERVER
    + """)
update {schema}.outbox_state set final = %(final)s from server
where final < %(final)s
    and (system_id, timeline, start) = (%(system_id)s, %(timeline)s, %(start)s)
"""
)

#: How often a change of the tables is tried, and the pause between two tries, in seconds.
LOCK_TRIES, LOCK_AGAIN = 60, 1.0

#: Raised by `outbox_store`.
_MOVED = "MO001"
#: The table, the schema, the function or the column does not exist.
_MISSING = ("42P01", "3F000", "42883", "42703")


class PsycopgPool(Protocol):
    """A pool of psycopg connections: of the reservoir, of psycopg_pool, or a `Postgres`.

    Its connections may be in autocommit mode or not: statements that belong together are in a
    `conn.transaction()` or sent as one query, and all is committed at the end at the latest.
    """

    def connection(self) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        """Check out a connection; commit at the end, or roll back after an error."""
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
    #: The time of the insertion, by the server's clock; the order is that of `id`.
    at: datetime
    _consumer: OutboxConsumer | None = None

    @property
    def id(self) -> int:
        """The number of the event: later ones of a consumer are higher, and there are gaps.

        Without a table it holds the LSN of the commit, and the number within the transaction.
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
        return f"<OutboxEvent {self.id} in {self.channel!r}{tenant}>"


class Page(NamedTuple):
    """The events after a cursor, and the state of the outbox when they were read."""

    server: OutboxState
    events: list[OutboxEvent]
    #: Whether there were no further events that could be read.
    complete: bool


class Reader:
    """Runs the statements on pooled connections."""

    def __init__(self, connections: PsycopgPool, schema: str) -> None:
        #: Replaced when an outbox of a URL is opened again.
        self.connections = connections
        self._parts = parts(schema)
        #: What is final, for all readers of this process.
        self.looks = Looks(self.results)
        # What is stored of it, and where.
        self._kept: tuple[Server, int] | None = None
        # When the statements in progress were begun.
        self._running: dict[object, float] = {}

    def connection(self) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        """Check out a connection."""
        return self.connections.connection()

    @property
    def unanswered(self) -> float:
        """Seconds for which the server has not answered the pool, or the oldest statement."""
        now = time.monotonic()
        waited = max((now - began for began in list(self._running.values())), default=0.0)
        return max(waited, getattr(self.connections, "silent_for", 0.0))

    async def page(
        self,
        after: Cursor | None,
        limit: int,
        channels: Sequence[str] = (),
        tenant: str | None = None,
    ) -> Page:
        """Read the events after a cursor that can be read now; with None, only the state."""
        cursor = after or Cursor(History("", 0), 0)
        while True:
            # In an earlier snapshot than that of the rows.
            look = await self.looks.from_now()
            rows = await self.run(
                _READ,
                id=min(cursor.id, _LARGEST),
                mark=cursor.mark,
                final=look.final,
                channels=list(channels) or None,
                tenant=tenant,
                limit=0 if after is None else limit,
                bytes=PAGE_BYTES,
            )
            system_id, timeline, start, floor, found, mark, total, *_ = rows[0]
            if look.server == Server(History(system_id, timeline), start):
                break  # what is final is of this server
        state = OutboxState(
            look.server.history, look.final, look.highest, floor, found, mark or 0, look.snapshot
        )
        events = [_event(state.history, row[7:]) for row in rows if row[6] is not None]
        return Page(state, events, (total or 0) < limit and len(events) == (total or 0))

    async def attach(self, name: str, cursor: Cursor, *, force: bool) -> Cursor:
        """Return the stored cursor of a consumer; store this one if there is none, or if forced."""
        rows = await self.run(_ATTACH, name=name, cursor=str(cursor), force=force)
        return Cursor.parse(rows[0][0])

    async def store(self, name: str, old: Cursor, new: Cursor) -> None:
        """Store a consumer's cursor; raise `ConsumerReplaced` if it is not the old one."""
        await self.run(_STORE, name=name, old=str(old), new=str(new))

    async def keep_final(self) -> None:
        """Store what is final, with which the next process begins, if the role may do so."""
        if (look := self.looks.last) is None or self._kept == (look.server, look.final):
            return
        (system_id, timeline), start = look.server
        with suppress(psycopg.errors.InsufficientPrivilege):
            await self.run(
                _KEEP, final=look.final, system_id=system_id, timeline=timeline, start=start
            )
        self._kept = look.server, look.final

    async def change(
        self, query: Statements, what: str = "the outbox", /, **names: sql.Composable
    ) -> None:
        """Run statements that need strong locks, without stopping publishers for long."""
        text = self._filled(query, **names)
        for _ in range(LOCK_TRIES):
            try:
                await self.run(sql.SQL("set local lock_timeout = '500ms';") + text)
                return
            except psycopg.errors.LockNotAvailable:
                await asyncio.sleep(LOCK_AGAIN)
        raise PostgresError(
            f"{what} cannot be changed: at each of {LOCK_TRIES} tries, a transaction that writes to"
            " it or reads it was open for more than half a second: end that transaction (it has"
            f" locks of {what} in pg_locks), and run this again"
        )

    async def alone(self, query: LiteralString, **names: sql.Composable) -> None:
        """Run a statement that must not be within a transaction."""
        async with self.connection() as conn:
            before = conn.autocommit
            await conn.set_autocommit(True)
            try:
                await conn.execute(self._filled(query, **names))
            finally:
                if not conn.closed:
                    await conn.set_autocommit(before)

    def _filled(self, query: Statements, **names: sql.Composable) -> sql.SQL | sql.Composed:
        if isinstance(query, str):
            return sql.SQL(query).format(**self._parts, **names)
        return query

    async def run(self, query: Statements, **values: Any) -> list[Any]:
        """Run statements on a connection of the pool; return the rows of the last one."""
        return (await self.results(query, **values))[-1]

    async def results(
        self, query: Statements, within: float | None = None, /, **values: Any
    ) -> list[list[Any]]:
        """Run statements on a connection of the pool; return the rows of each.

        :param within: cut a connection that has given no answer after so many seconds.
        """
        text = self._filled(query)
        key = object()
        self._running[key] = time.monotonic()
        try:
            async with self.connection() as conn:
                return await uncancelled(conn, _results(conn, text, values), within)
        except psycopg.Error as error:
            raise_if_cancelled(error)
            raise translated(error) from error
        finally:
            del self._running[key]


async def _results(
    conn: psycopg.AsyncConnection[Any], text: sql.SQL | sql.Composed, values: dict[str, Any]
) -> list[list[Any]]:
    async with AsyncClientCursor(conn) as cursor:
        await cursor.execute(text, values or None)
        found = []
        while True:
            found.append(await cursor.fetchall() if cursor.description else [])
            if not cursor.nextset():
                break
    await conn.commit()
    return found


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


def _event(history: History, row: Sequence[Any]) -> OutboxEvent:
    id_, tenant, channel, payload, at, mark = row
    return OutboxEvent(Cursor(history, id_, mark), tenant, channel, payload, at)
