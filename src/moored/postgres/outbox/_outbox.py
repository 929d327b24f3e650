"""`Outbox`: events that are published with the caller's transaction, and consumed without gaps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast, get_args
from weakref import WeakSet

import psycopg
from psycopg import sql

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Context,
    Recorder,
    Supervisor,
    Tree,
    describe,
    duration,
    refuse,
    unmet,
)
from moored.reservoir import AsyncConnectionPool

from .._errors import ConfigurationError, PostgresError
from ..consume import Reset
from ..report import explained
from ..server import pool_by
from . import _ddl
from ._consumer import CLOSE, HELD, PAGE, TEMPORARY, OutboxConsumer
from ._cursor import Cursor
from ._ddl import Wake
from ._publish import check_schema, message_prefix, publish
from ._reader import OutboxEvent, PsycopgPool, Reader
from ._ring import StreamRing
from ._status import OutboxStatus, installed_wake, read_status
from ._stream_wakes import StreamWakes
from ._upgrade import build_indexes
from ._wakes import Wakes, WakeSource

if TYPE_CHECKING:
    from .._postgres import Postgres

log = logging.getLogger("moored.postgres")

#: Seconds after which a statement without an answer is told by `explain()` and `delayed`.
UNANSWERED = 2.0
#: Seconds between two runs of the upkeep, and after one that an open transaction has prevented.
UPKEEP_EVERY, UPKEEP_AGAIN = 600.0, 60.0
#: Seconds between two queries of the state, for metrics and warnings.
WATCH_EVERY = 15.0
#: A transaction that holds events back for so many seconds is logged, and told, too.
HELD_TOO_LONG = 10.0
#: Connections of an outbox that was given a URL.
POOL_SIZE = 4

_DAY = 86400.0

T = TypeVar("T")


class OutboxBatch(NamedTuple):
    """Events after a cursor, in the total order, and where to continue."""

    events: list[OutboxEvent]
    #: Pass it as `after` to the next `read()`.
    cursor: str
    #: Set if events may be missing between `after` and these events.
    reset: Reset | None


class OutboxUpkeep(NamedTuple):
    """The result of one run of the upkeep."""

    #: Partitions that were created for the next periods.
    created: int
    #: Partitions that were dropped by the retention; None if an open transaction prevented it.
    dropped: int | None


class Outbox:
    """Events in a table, published in the caller's own transaction and read without gaps.

    :param source: a pool of psycopg connections (of `moored.reservoir` or psycopg_pool), a
        `Postgres`, whose outboxes have a small pool of their own, or a URL; it may lead to a pooler
        in transaction mode.
    :param listener: a `Listener`, whose notifications wake the consumers; by default that of the
        `Postgres`. Whatever wakes them, consumers read every second as well; every 30 s while a
        listener is up and publishers wake by NOTIFY.
    :param wake: how publishers wake consumers in an outbox that is installed by this object.
        "stream", the default for a `Postgres`: by messages in its change stream; the process that
        has the stream notifies the others. "notify", the default otherwise: by NOTIFY, which takes
        a lock of the whole server at each commit. "poll": not at all. Consumers hear what there is
        to hear, however the outbox was installed.
    :param table: False for an outbox without a table, of a `Postgres(…, messages=True)`: events are
        messages in the WAL, need no installation, and the last ones are kept in the memory of each
        process, so that `read()` and `tail()` give a `reset` for an older cursor. There is no
        `consume()`: use `Postgres.changes()`. Each process needs a stream of its own (`stream_id`).
    :param ring: the number of events that an outbox without a table keeps, of 64 MB at most.
    :param schema: where the tables are.
    :param install: run `install()` at the start; otherwise `moored outbox install` has run before.
    :param retain: how long events are kept, in seconds. A consumer that is further behind gets a
        `Reset`. None leaves the upkeep, also new partitions, to others (`moored outbox prune`).
    :param max_bytes: drop the oldest partitions beyond this size, except the current one.
    :param partition: the period of one partition, in seconds: what is dropped at once.
    :param show_queries: include the last statement, without literals, of a transaction that holds
        events back. Set it only if operators alone can read the report.
    """

    def __init__(
        self,
        source: str | PsycopgPool,
        *,
        listener: WakeSource | None = None,
        wake: Wake | None = None,
        table: bool = True,
        ring: int = 10_000,
        schema: str = "moored",
        install: bool = False,
        retain: float | None = 7 * _DAY,
        max_bytes: int | None = None,
        partition: float = _DAY,
        show_queries: bool = False,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        streams = hasattr(source, "changes")
        wake = wake or ("stream" if streams else "notify")
        refuse(
            "Outbox",
            unmet(
                ("retain", retain, retain is None or retain > 0, "> 0 s, or None"),
                ("max_bytes", max_bytes, max_bytes is None or max_bytes > 0, "> 0, or None"),
                ("partition", partition, partition >= 1.0, "at least 1 s"),
                ("wake", wake, wake in get_args(Wake), f"one of {get_args(Wake)}"),
                ("ring", ring, ring > 0, "> 0"),
                ("table", table, table or wake == "stream", 'True, unless wake="stream"'),
                # Not the source itself, which may be a URL with a password.
                (
                    "source",
                    type(source),
                    wake != "stream" or streams,
                    'a Postgres for wake="stream"',
                ),
            ),
        )
        self.schema = check_schema(schema)
        self.retain = retain
        self.max_bytes = max_bytes
        self.partition = partition
        #: The state as it was queried last, every 15 s; None if that was not possible.
        self.last_status: OutboxStatus | None = None
        #: Called by the first consumer, if the outbox was not opened before: starts `child()`.
        self.on_first_use: Callable[[], object] | None = None
        #: Called after each query of `last_status`.
        self.on_status: Callable[[], object] | None = None
        self._install = install
        self._show_queries = show_queries
        self.wake = wake
        self.table = table
        channel = _ddl.wake_channel(self.schema) if table else message_prefix(self.schema)
        self._ring = None if table else StreamRing(cast(Any, source), channel, ring)
        listener = listener or getattr(source, "listener", None)
        sources: dict[str, WakeSource] = {}
        if streams:
            sources["stream"] = self._ring or StreamWakes(cast(Any, source))
        if table and listener is not None:
            sources["listener"] = listener
        self.wakes = Wakes(sources, channel, self._certain)
        self._clock = clock
        self._recorder = recorder
        #: The `Postgres` whose outbox it is; None for one of a pool or a URL.
        self.postgres = cast("Postgres", source) if streams else None
        self._url = source if isinstance(source, str) else None
        if isinstance(source, str):
            connections: PsycopgPool = _pool(source)
        else:
            connections = source if self.postgres is None else self.postgres.outbox_pool
        self._reader = Reader(connections, self.schema)
        self._pages = self._ring or self._reader
        self._consumers: WeakSet[OutboxConsumer] = WeakSet()
        self._supervisor: Supervisor | None = None
        self._stack = AsyncExitStack()
        self._state = "new"
        self._reported: str | None = None

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the upkeep and the wake-ups; `async with` calls this.

        `publish()` does not need it, nor does any method that runs one statement, if the outbox
        was given a pool that is open. After an error, it can be called again.
        """
        if self._state != "new":
            raise PostgresError(f"{self!r} was opened before: create a new one")
        self._state = "opening"
        try:
            async with AsyncExitStack() as stack:
                if self._url is not None:
                    # A pool is opened once, and this may be a further attempt.
                    self._reader.connections = pool = _pool(self._url)
                    await stack.enter_async_context(pool)
                if self._install:
                    await self.install()
                supervisor = Supervisor(
                    "outbox", children=self._children(), clock=self._clock, recorder=self._recorder
                )
                await stack.enter_async_context(supervisor)
                self._stack = stack.pop_all()
        except BaseException:
            self._state = "new"
            raise
        self._supervisor, self._state = supervisor, "open"

    def child(self) -> Child:
        """Return the upkeep and the wake-ups as a child of a supervisor, in place of `open()`."""
        self._state = "open"
        return Supervisor.child("outbox", children=self._children())

    def _children(self) -> list[Child]:
        children = self.wakes.children()
        if self.table:
            children.append(Child("watch", self._watch))
        if self.table and self.retain is not None:
            children.append(Child("upkeep", self._upkeep))
        return children

    async def close(self) -> None:
        """End every consumer, store their cursors, and stop the upkeep."""
        self._state = "closed"
        self.wakes.wake()
        try:
            await asyncio.gather(*(consumer.aclose() for consumer in self._consumers))
            with suppress(*TEMPORARY):
                async with asyncio.timeout(CLOSE):
                    await self._reader.keep_final()
        finally:
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- publish and consume -------------------------------------------------------------------

    def publish(self, conn: Any, channel: str, payload: Any, *, tenant: str | None = None) -> Any:
        """Publish an event in the transaction of `conn`: it exists if and when that commits.

        :param conn: a connection of psycopg (sync or async), asyncpg or SQLAlchemy (a connection
            or session, sync or async), or a cursor of psycopg or Django. If it is an async one,
            await the result.
        :param payload: of any size; a str as it is, any other value as JSON.
        :param tenant: the tenant that the event belongs to; None for an event without a tenant.
        """
        return publish(conn, self.schema, channel, payload, tenant, table=self.table)

    def consume(
        self,
        consumer: str = "default",
        *,
        channels: Sequence[str] = (),
        tenant: str | None = None,
        start: str = "oldest",
    ) -> OutboxConsumer:
        """Return the events of a named consumer, at least once: `async for event in …`.

        The order is the same for all consumers, and an event that is published after the commit of
        another one comes after it. Those of concurrent transactions may be interleaved.

        :param consumer: the name under which its cursor is stored, in the database.
        :param channels: the channels to read; without any, all.
        :param tenant: the tenant whose events to read; None for the events of all.
        :param start: where a new consumer begins, and one that was reset goes on: "oldest" or
            "now". Or a cursor that the consumer has stored itself: it replaces the stored one.
        """
        refuse("consume()", _filter_mistakes(channels))
        if not self.table:
            raise PostgresError(
                "an outbox without a table stores no cursors: use read() or tail() with a cursor of"
                " your own, or consume its messages with Postgres.changes()"
            )
        self._check_open()
        events = OutboxConsumer(
            self._reader, self.wakes, self.schema, consumer, channels, tenant, start
        )
        self._consumers.add(events)
        return events

    async def read(
        self,
        after: str | None = None,
        *,
        limit: int = 500,
        channels: Sequence[str] = (),
        tenant: str | None = None,
    ) -> OutboxBatch:
        """Return the events after a cursor that can be read now; without one, from the oldest.

        If the cursor is of another server or is older than the retention, the batch has a `reset`
        and no events, and its cursor is that of the oldest event.
        """
        refuse("read()", _filter_mistakes(channels))
        cursor, reason = None, None
        try:
            cursor = None if after is None else Cursor.parse(after)
        except ValueError as error:
            reason = str(error)
        if cursor is None:
            cursor = (await self._pages.page(None, 0)).server.oldest()
        if reason is None:
            page = await self._pages.page(cursor, limit, channels, tenant)
            reason = page.server.refuses(cursor)
            if reason is None:
                last = page.events[-1].cursor if page.events else str(cursor)
                return OutboxBatch(page.events, last, None)
            cursor = page.server.oldest()
        return OutboxBatch([], str(cursor), Reset(reason))

    async def tail(
        self, after: str | None = None, *, channels: Sequence[str] = ()
    ) -> AsyncIterator[OutboxBatch]:
        """Yield the events of all tenants as they can be read, without a stored cursor.

        A batch with a `reset` has no events; the next ones continue with what is published then.
        An error of the database is raised: call it again with the cursor of the last batch. So is
        a `PostgresError` when the outbox is closed.

        :param after: the cursor to begin after; without one, with the events from now on.
        """
        self._check_open()
        held = Backoff(*HELD)
        cursor = None if after is None else Cursor.parse(after)
        if cursor is None:
            cursor = (await self._pages.page(None, 0)).server.now()
            yield OutboxBatch([], str(cursor), None)
        while True:
            self._check_open()
            woken = self.wakes.next()
            page = await self._pages.page(cursor, PAGE, channels)
            if (reason := page.server.refuses(cursor)) is not None:
                cursor = page.server.now()
                yield OutboxBatch([], str(cursor), Reset(reason))
                continue
            cursor = page.server.after(cursor) if page.complete else page.events[-1]._cursor
            if page.events:
                held.succeed()
                yield OutboxBatch(page.events, str(cursor), None)
            else:
                await self.wakes.more(woken, held, page.server)

    def place(self, cursor: str) -> int:
        """Return the sort key of a cursor; raise `ValueError` for an invalid cursor."""
        return Cursor.parse(cursor).id

    async def drop_consumer(self, name: str) -> None:
        """Remove the stored cursor of a consumer."""
        await self._reader.run(
            "delete from {schema}.outbox_cursors where consumer = %(name)s", name=name
        )

    # -- installation and upkeep ---------------------------------------------------------------

    async def install(self, *, wake: Wake | None = None, roles: Sequence[str] = ()) -> None:
        """Create the tables and functions, or bring older ones up to date.

        For older tables it waits until no publisher is open, for half a second at a time, in which
        other publishers wait behind it. In a large older outbox run `upgrade()` instead, which
        blocks none of them while it builds the indexes.

        :param wake: how publishers wake consumers; by default as it is installed, or for a new
            outbox as this object says.
        :param roles: roles that may publish, consume and run the upkeep.
        """
        wake = wake or await self.installed_wake() or self.wake
        grants = [_ddl.grants(role, self.schema) for role in roles]
        ddl = _ddl.ddl(self.schema, wake=wake)
        await self._reader.change(sql.SQL("".join([ddl, *grants])))

    async def installed_wake(self) -> Wake | None:
        """Query how publishers wake consumers; None if there is no outbox in the schema."""
        return await installed_wake(self._reader)

    async def capture(
        self, table: str, *, channel: str | None = None, tenant_column: str | None = None
    ) -> None:
        """Publish every change of a table from now on, by triggers.

        It waits until no transaction that writes to the table is open, for half a second at a time;
        not at all if the table is captured so already.

        :param channel: the events' channel; by default the table's name as it was given.
        :param tenant_column: the column that holds the events' tenant.
        """
        given = [channel or table, *([] if tenant_column is None else [tenant_column])]
        arguments = "".join(f"{each}\0" for each in given).encode()
        if await self._captured(table) != [(arguments, True)] * 2:
            await self._reader.change(
                sql.SQL(_ddl.capture(table, given, self.schema)), f"the table {table}"
            )

    async def uncapture(self, table: str) -> None:
        """Remove the triggers of `capture()`."""
        if await self._captured(table):
            await self._reader.change(sql.SQL(_ddl.uncapture(table)), f"the table {table}")

    async def _captured(self, table: str) -> list[Any]:
        return await self._reader.run(sql.SQL(_ddl.captured(table, self.schema)))

    async def captured_tables(self) -> list[str]:
        """Query the tables whose changes are published by `capture()`."""
        return [name for (name,) in await self._reader.run(_CAPTURED_TABLES)]

    async def uninstall(self) -> None:
        """Drop the tables with all events, the functions, and the triggers of captured tables.

        Programs that still publish get an error from then on. The schema stays.
        """
        await self._reader.change(sql.SQL(_ddl.removal(self.schema)))

    async def upgrade(self, *, report: Callable[[str], object] = log.info) -> None:
        """Bring an older outbox up to date while services publish.

        Programs of older versions go on publishing, and their consumers end with an error: start
        the new ones right after it.

        :param report: is given a line of text at each step.
        """
        if await self.installed_wake() is None:
            raise ConfigurationError(
                "the outbox is not installed in this database: run `moored outbox install`"
            )
        await build_indexes(self._reader, report)
        report(f"converting the tables and functions in schema {self.schema}")
        await self.install()

    async def upkeep(self) -> OutboxUpkeep:
        """Create the partitions of the next periods, and drop those beyond the retention.

        Of several processes, one does it at a time.
        """
        every = f"{self.partition} seconds"
        ((created,),) = await self._reader.run(_PARTITIONS, every=every)
        if self.retain is None:
            return OutboxUpkeep(created, 0)
        retain = f"{self.retain} seconds"
        ((dropped,),) = await self._reader.run(_PRUNE, retain=retain, max_bytes=self.max_bytes)
        return OutboxUpkeep(created, dropped)

    async def status(self) -> OutboxStatus:
        """Query the size, the age, what holds delivery back, and how far consumers are behind."""
        self.last_status = found = await read_status(self._reader, show_queries=self._show_queries)
        return found

    def _certain(self) -> str | None:
        """Return the name of the source of wake-ups that misses no event while it is up."""
        if self._ring is not None:
            return "stream"
        return "listener" if self.last_status and self.last_status.wake == "notify" else None

    def statistics(self) -> dict[str, Any]:
        """Return the state as plain data, as of the last query of it."""
        return {
            "schema": self.schema,
            "wake": self.wake,
            "woken": self.wakes.up,
            "consumers_here": len(self._consumers),
            "unanswered": self._reader.unanswered,
            "status": self.last_status and self.last_status.plain(),
        }

    def explain(self) -> str:
        """Return as text what the consumers wait for, and what to do about it."""
        found = self.last_status
        unknown = "its state is not known" if self.table else "without a table"
        head = unknown if found is None else str(found)
        installed = self.wake if found is None else found.wake
        how = f"at each wake-up by {installed}" if self.wakes.up else "every second"
        because = [f"its consumers read {how}"]
        so = "there is nothing to do"
        if installed == "notify" and self.wake == "stream":
            because.append("each publishing commit takes a lock of the whole server, for NOTIFY")
            so = "when every process runs this version, run `moored outbox install --wake stream`"
        if silent := self._silent:
            because.append(f"it {silent}")
            so = "find out whether the server answers, and whether the pool has a connection for it"
        if found is not None and found.held_back is not None:
            because.append(f"delivery is held back: {found.held_back}")
            so = f"end that transaction: {found.held_back.remedy}"
        return explained(f"{self.schema}: {head}", because, so)

    @property
    def _silent(self) -> str:
        """For how long the server has not answered; empty if it answers."""
        waited = self._reader.unanswered
        if waited <= UNANSWERED:
            return ""
        return f"has had no answer of the server for {duration(waited)}"

    @property
    def delayed(self) -> str:
        """Why events come late, and what to do; empty if they do not.

        The server does not answer, or, by the `last_status`, holds events back for ten seconds.
        """
        if silent := self._silent:
            return f"the outbox {silent}"
        held = self.last_status and self.last_status.held_back
        if held is None or held.lasted < HELD_TOO_LONG:
            return ""
        return f"delivery is held back: {held}; {held.remedy}"

    @property
    def is_open(self) -> bool:
        """Whether the outbox has been started, and not closed."""
        return self._state == "open"

    def tree(self) -> Tree:
        """Return the supervision tree of an outbox that runs alone."""
        if self._supervisor is None:
            raise PostgresError(f"{self!r} is not open, or is a part of another tree")
        return self._supervisor.tree()

    def _check_open(self) -> None:
        if (start := self.on_first_use) is not None and self._state == "new":
            self.on_first_use = None
            start()
        if not self.is_open:
            raise PostgresError(f"{self!r} is not open: use `async with`")

    async def _upkeep(self, ctx: Context) -> None:
        ctx.started()
        while True:
            done = await _attempt("the upkeep of the outbox failed", self.upkeep)
            postponed = done is None or done.dropped is None
            await asyncio.sleep(UPKEEP_AGAIN if postponed else UPKEEP_EVERY)

    async def _watch(self, ctx: Context) -> None:
        ctx.started()
        while True:
            found = await _attempt("the state of the outbox could not be queried", self.status)
            self.last_status = found
            if found is not None:
                await _attempt("what is final could not be stored", self._reader.keep_final)
            held = found and found.held_back
            if held is None or not self.delayed:
                self._reported = None
            elif held.statement != self._reported:
                self._reported = held.statement
                log.warning("%s", self.delayed)
            if self.on_status is not None:
                self.on_status()
            await asyncio.sleep(WATCH_EVERY)

    def __repr__(self) -> str:
        state = f"{len(self._consumers)} consumers" if self.is_open else "not open"
        return f"<Outbox in schema {self.schema}: {state}>"


_CAPTURED_TABLES = """
select tgrelid::regclass::text from pg_trigger
where tgfoid = to_regproc({capture}) and tgname = 'moored_outbox_capture' order by 1
"""
_PARTITIONS = "select {schema}.outbox_partitions(%(every)s::interval)"
_PRUNE = "select {schema}.outbox_prune(%(retain)s::interval, %(max_bytes)s)"


def _pool(url: str) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
    return pool_by(url, min_size=1, max_size=POOL_SIZE, name="outbox")


async def _attempt(failure: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """Return the result of background work; log an error, and return None."""
    try:
        return await work()
    except TEMPORARY as error:
        log.warning("%s: %s", failure, describe(error))
        return None


def _filter_mistakes(channels: Sequence[str]) -> list[str]:
    return ["channels must be a list of str, not a str"] if isinstance(channels, str) else []
