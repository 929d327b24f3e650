"""`Postgres`: supervised connections to one database, for queries and for its change stream."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self, overload

import psycopg

from moored.kernel import (
    SECRETS,
    Callers,
    Clock,
    Deadline,
    Link,
    Recorder,
    Supervisor,
    Tasks,
    Tree,
    refuse,
)
from moored.reservoir import PoolClosed

from ._errors import ConfigurationError, PostgresError
from ._position import RESUME, Position, Resume
from ._settings import Settings, default_state_dir
from .consume import Changes, SchemaChanged, mistakes, stored
from .listen import Listener
from .manage import Restarter, Role, Stack
from .outbox import Outbox, OutboxPool
from .report import (
    CONDITIONS,
    Health,
    StackEvent,
    Status,
    explain,
    links,
    report,
    stream_fact,
    who,
    with_health,
)
from .snapshot import Copies, CopyPosition, Follow, Snapshot

__all__ = ["Postgres", "StackEvent"]

log = logging.getLogger("moored.postgres")


class Postgres:
    """A supervised connection manager: pooled connections, and a stream of committed changes.

    Use it with `async with`. It connects in the background: `wait_until_active()` waits until the
    stream works, and `connection()` and `changes()` wait by themselves.

    :param database_url: for `connection()`; it may lead to a pooler.
    :param replication_url: the URL of the server itself, not of a pooler, for replication, the lock
        and administration; by default `database_url`.
    :param notify_url: the URL of the server itself, not of a pooler, for `listener`. Without it,
        the first subscription opens the listener with `database_url`, unless that leads to a
        pooler; "" turns the listener off.
    :param stream_id: names the slot, the publication, the lock and the state file. Of the instances
        with the same `stream_id`, one streams and the others stand by: their connections, outbox
        and listener work. Instances with different ones stream in parallel.
    :param pool_size: connections of both pools together; a standby has only that of callers.
    :param state_dir: where the positions of consumers are stored; by default `MOORED_STATE_DIR`, or
        a directory for this database in the user's state home.
    :param slot: the name of the replication slot; by default `moored_slot_<stream_id>`.
    :param publication: the name of the publication; by default `moored_publication_<stream_id>`.
    :param manual_publication: never create or change the publication.
    :param temporary_slot: use a slot that the server drops when its connection ends: changes until
        the next connection are lost, and consumers get a `Reset`.
    :param recreate_slot: drop the slot at the start, and with it all unconsumed changes.
    :param failover_slot: let standbys keep a copy of the slot (PostgreSQL 17 and later).
    :param binary: receive values in binary format (PostgreSQL 14 and later). Values of types for
        which psycopg has no binary loader, such as types of extensions, are then bytes.
    :param messages: receive the messages of pg_logical_emit_message().
    :param connect_timeout: the timeout of one connection attempt, in seconds.
    :param shutdown_timeout: after so many seconds, `close()` aborts the remaining connections.
    :param check_every: how often publication, slot, tables and columns are checked, in seconds;
        they are also checked when a consumer attaches, and when the catalog, which is queried for
        changes once a second, or the stream shows that a table has changed.
    :param sleep_after: close all connections after so many seconds without use; None for never.
    :param max_retained_wal: bytes of WAL that the server may retain for the slot before
        `on_retained_wal` applies.
    :param on_retained_wal: "warn", or "drop" the consumer that is furthest behind, with a `Reset`.
    :param application_name: the `application_name` of all connections.
    :param show_queries: include the SQL, without literals, of transactions that a new slot waits
        for. Set it only if operators alone can read the report.
    """

    def __init__(
        self,
        database_url: str,
        *,
        replication_url: str | None = None,
        notify_url: str | None = None,
        stream_id: str = "default",
        pool_size: int = 20,
        state_dir: str | os.PathLike[str] | None = None,
        slot: str = "",
        publication: str = "",
        manual_publication: bool = False,
        temporary_slot: bool = False,
        recreate_slot: bool = False,
        failover_slot: bool = True,
        binary: bool = False,
        messages: bool = False,
        connect_timeout: float = 30.0,
        shutdown_timeout: float = 10.0,
        check_every: float = 60.0,
        sleep_after: float | None = None,
        max_retained_wal: int | None = None,
        on_retained_wal: Literal["warn", "drop"] = "warn",
        application_name: str = "moored",
        show_queries: bool = False,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = Settings(
            database_url=database_url,
            replication_url=replication_url or database_url,
            stream_id=stream_id,
            pool_size=pool_size,
            state_dir=Path(state_dir).absolute()
            if state_dir is not None
            else default_state_dir(replication_url or database_url),
            slot=slot,
            publication=publication,
            manual_publication=manual_publication,
            temporary_slot=temporary_slot,
            recreate_slot=recreate_slot,
            failover_slot=failover_slot,
            binary=binary,
            messages=messages,
            connect_timeout=connect_timeout,
            shutdown_timeout=shutdown_timeout,
            check_every=check_every,
            sleep_after=sleep_after,
            max_retained_wal=max_retained_wal,
            on_retained_wal=on_retained_wal,
            application_name=application_name,
            show_queries=show_queries,
        )
        #: The URL of the listener; None for `database_url`, and "" for no listener.
        self.notify_url = notify_url
        SECRETS.add_from(notify_url or "")
        self.clock = clock or Clock.current()
        self.recorder = recorder or Recorder(clock=self.clock)
        self._state = "new"
        #: The text of a fatal error, which an operator must correct; None if there is none.
        self.fatal: str | None = None
        #: The listener; None if it is turned off by `notify_url=""`. Use it after `open()`.
        self.listener = self._new_listener()
        #: The connections of outboxes.
        self.outbox_pool = OutboxPool(self.settings, self._awake, self.clock, self.recorder)
        #: The outbox in the schema `moored`, woken by the listener; its first consumer starts it,
        #: after `open()`. It must be installed (`await pg.outbox.install()`). While it has
        #: consumers, the connections do not sleep. For other settings, make one: `Outbox(pg, …)`.
        self.outbox = Outbox(self, listener=self.listener, show_queries=show_queries)

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the connections in the background; `async with` calls this."""
        if self._state != "new":
            raise PostgresError(f"{self!r} was opened before: create a new one")
        self._state = "opening"
        try:
            stack = await Stack.open(self.settings, self.clock, self.recorder)
        except BaseException:
            self._state = "closed"
            raise
        if self._state != "opening":
            await stored(stack.store.close)
            raise PostgresError(f"{self!r} was closed while it was opened")
        self._stack = stack
        self._state = "open"
        self._hub = stack.hub
        self._copies = Copies(stack, self.connection)
        self.machine, self.monitor = stack.machine, stack.monitor
        #: The transactions that have published to an outbox, as the stream shows them.
        self.published = stack.published
        #: The last events, the oldest first.
        self.last_events = stack.events.last
        self._tasks = Tasks()
        self._restarter = Restarter(stack, self._fail, self.outbox_pool.close)
        self._supervisor = self._tree()
        self._start_at_first_use()
        try:
            await self._supervisor.start()
        except BaseException:  # cancelled
            await self.close()
            raise

    def _start_at_first_use(self) -> None:
        """Let the first consumer of the outbox start it; also the listener, if it has no URL."""
        listener, supervisor = self.listener, self._supervisor
        if listener is not None and self.notify_url is None:
            listener.on_first_use = lambda: self._tasks.start(
                supervisor.start_child(listener.child())
            )
        self.outbox.on_first_use = lambda: self._tasks.start(
            supervisor.start_child(self.outbox.child())
        )

    def _tree(self) -> Supervisor:
        """Return the supervision tree of the connections; consumers are not part of it."""
        listener = [] if self.listener is None or not self.notify_url else [self.listener.child()]
        return Supervisor(
            "postgres",
            children=[self._restarter.child(), *listener],
            auto_shutdown="any_significant",
            recorder=self.recorder,
            clock=self.clock,
        )

    def _new_listener(self) -> Listener | None:
        """Return the listener, unless it is turned off."""
        if self.notify_url == "":
            return None
        settings = self.settings
        listener = Listener(
            self.notify_url or settings.database_url,
            notify_through=self,
            # A canary would count as a use, and nothing would ever sleep.
            canary_every=5.0 if settings.sleep_after is None else None,
            optional=self.notify_url is None,
            name=f"postgres.{settings.stream_id}.listener",
            application_name=f"{settings.application_name} listener",
            clock=self.clock,
            recorder=self.recorder,
        )
        listener.stands_by = lambda: (
            self._restarter.asleep
            or (self.monitor.status().health is Health.WAITING and not self._has_pool)
        )
        if self.notify_url is not None:
            listener.on_refused = lambda error: self._fail(str(error))
        return listener

    def _fail(self, text: str) -> None:
        self.fatal = text
        log.error("%s", text)
        self._hub.end(ConfigurationError(text))
        if self.listener is not None:
            self.listener.end(ConfigurationError(text))
        self.monitor.clear(CONDITIONS[0], text)

    async def close(self) -> None:
        """End every consumer, then close all connections, within `shutdown_timeout`."""
        try:
            if self._state == "open":
                await self.outbox.close()  # its consumers store their cursors by these connections
        finally:
            await self._end()

    async def _end(self) -> None:
        if self._state != "open":
            self._state = "closed"
            return
        self._state = "closed"
        self._hub.end(None)
        self.monitor.clear(CONDITIONS[0], "closed")  # release the callers that wait
        try:
            await self._supervisor.stop()
        finally:  # also if the caller is cancelled, which is raised when all have stopped
            if self.listener is not None:
                self.listener.end()
            await self.outbox_pool.close()
            self._stack.events.end()
            await stored(self._stack.store.close)

    async def drop(self) -> None:
        """Close, and drop the replication slot and the publication at the server.

        A stream that sleeps is woken first. Raises `PostgresError` if no connection can be opened,
        or if another instance reads the slot.
        """
        self._check_open()
        if self._restarter.asleep:
            await self.wait_until_active(self.settings.connect_timeout)
        self._restarter.manager.drop_requested = True
        await self.close()
        await self._stack.drop_slot_and_publication()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- use -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def connection(
        self, timeout: float = 30.0
    ) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Check out a pooled connection; commit its transaction at the end, or roll it back."""
        self._check_open()
        deadline = Deadline.after(timeout, self.clock)
        with self._restarter.in_use():
            checkout, conn = await self._checked_out(deadline)
            async with checkout:
                yield conn

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Keep the connections from sleeping; raise if it is not open, or after a fatal error."""
        self._check_works()
        with self._restarter.in_use():
            await self.wake()
            yield

    async def _checked_out(
        self, deadline: Deadline
    ) -> tuple[AsyncExitStack, psycopg.AsyncConnection[Any]]:
        """Check out a connection of the current pool; of the next one if that is closed."""
        while True:
            await self.wake()
            await self._wait(lambda _: self._has_pool, deadline.timeout)
            pool = self._restarter.manager.pools[Role.SNAPSHOT].pool
            async with AsyncExitStack() as stack:
                try:
                    conn = await stack.enter_async_context(
                        pool.connection(timeout=deadline.remaining())
                    )
                except PoolClosed:
                    deadline.check("getting a connection")
                    continue
                return stack.pop_all(), conn

    @overload
    def changes(
        self,
        consumer: str = "default",
        *,
        tables: tuple[str, ...] | list[str] = (),
        start: Position | str | Resume | None = RESUME,
        schema_changes: Literal[False] = False,
    ) -> Changes: ...

    @overload
    def changes(
        self,
        consumer: str = "default",
        *,
        tables: tuple[str, ...] | list[str] = (),
        start: Position | str | Resume | None = RESUME,
        schema_changes: bool,
    ) -> Changes[SchemaChanged]: ...

    def changes(
        self,
        consumer: str = "default",
        *,
        tables: tuple[str, ...] | list[str] = (),
        start: Position | str | Resume | None = RESUME,
        schema_changes: bool = False,
    ) -> Changes[Any]:
        """Return committed transactions, in commit order, at least once: `async for txn in …`.

        :param consumer: the name under which acknowledgements are stored, also while it is closed.
        :param tables: the tables to follow, which are added to the publication; without any, all
            tables of the publication.
        :param start: a position that the consumer has stored itself; later transactions follow.
            With `RESUME`, or None if it has stored none yet, all follow that are not acknowledged.
        :param schema_changes: also deliver a `SchemaChanged` when columns of the tables were added,
            dropped, renamed, or given another type that leaves the rows as they are.
        """
        self._check_open()
        refuse("changes()", mistakes(tables, consumer))
        if self.fatal is not None:
            raise ConfigurationError(self.fatal)
        if isinstance(start, str):
            start = Position.parse(start)
        self._wake_soon()
        place = None if start is RESUME else start
        return self._hub.attach(
            consumer, tables=tuple(tables), start=place, schema_changes=schema_changes
        )

    def snapshot(
        self,
        table: str,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        chunk_rows: int | None = None,
        consistent: bool = False,
        start: CopyPosition | str | None = None,
    ) -> Snapshot:
        """Return the rows of a table: `async with pg.snapshot("orders") as snapshot`.

        :param where: a condition in SQL, as after WHERE; it is not escaped.
        :param columns: the columns to read, besides the key; by default all.
        :param chunk_rows: the number of rows that are read in one transaction, by default 50,000,
            or 150,000 for `blocks()`; fewer if they have more than about 16 MB. Up to three chunks
            are buffered, because two are read at the same time.
        :param consistent: read all rows with one snapshot, in one transaction, which holds back
            vacuum while it is open; it cannot be continued with `start`.
        :param start: the `position` of a snapshot that was not finished: continue it.
        """
        self._check_open()
        return self._copies.snapshot(
            table,
            where=where,
            columns=columns,
            chunk_rows=chunk_rows,
            consistent=consistent,
            start=start,
        )

    def follow(
        self,
        table: str,
        *,
        consumer: str = "default",
        where: str | None = None,
        columns: Sequence[str] | None = None,
        chunk_rows: int = 20_000,
        begin_again: bool = True,
        start: CopyPosition | Position | str | Resume | None = RESUME,
    ) -> Follow:
        """Return the rows of a table, and then its changes: `async for item in pg.follow(…)`.

        Items are `Rows`, transactions, and a `Reset` when the copy must begin again: discard what
        was delivered before. After a crash, it continues after the last acknowledged item, unless
        the consumer stores positions itself, and passes them as `start`.

        :param consumer: the name under which acknowledgements are stored, as of `changes()`.
        :param where: a condition in SQL, as after WHERE; it is not escaped. The rows of each
            transaction are then read from the server: a row that meets it is an `Update`, and any
            other one a `Delete`.
        :param columns: the columns to deliver, besides the key; by default all.
        :param chunk_rows: the number of rows that are read in one transaction, and delivered as one
            item; fewer if they have more than about 16 MB.
        :param begin_again: begin again by itself after a `Reset`; otherwise the iteration ends.
        :param start: the `position` of an item, which the consumer has stored itself, or of a
            snapshot; if the table was not published when that began, there is a `Reset`. None, if
            the consumer has stored no position: it has no rows yet, and a new copy begins. By
            default (`RESUME`), the copy and the acknowledgements in the state file continue.
        """
        self._check_open()
        return self._copies.follow(
            table,
            lambda place: self.changes(consumer, tables=[table], start=place),
            where=where,
            columns=columns,
            chunk_rows=chunk_rows,
            begin_again=begin_again,
            start=start,
        )

    async def wait_until_published(self, *tables: str, timeout: float = 30.0) -> None:
        """Wait until these tables are published: earlier changes are not received.

        Without names, wait for the tables of every attached consumer.
        """
        deadline = Deadline.after(timeout, self.clock)
        await self.wait_until_active(deadline.timeout)
        with self._restarter.in_use():
            async with deadline.enforce("publishing"):
                await self._hub.published.wait(tables, self._hub.attached, self._check_works)

    async def drop_consumer(self, name: str) -> None:
        """Remove a consumer: the server no longer retains WAL for it."""
        self._check_open()
        await self._hub.drop(name)

    async def sleep(self) -> None:
        """Close all connections until the next use."""
        self._check_open()
        await self._restarter.sleep()

    async def wake(self) -> None:
        """Open the connections again, if they were closed by `sleep()` or `sleep_after`."""
        self._check_open()
        await self._restarter.wake()

    @property
    def _has_pool(self) -> bool:
        return self.monitor.conditions()["snapshot_connection_pool_ready"].met

    def _wake_soon(self) -> None:
        self._restarter.used()
        if self._restarter.asleep:
            self._tasks.start(self._restarter.wake())

    # -- state ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether `open()` was called, and not `close()`."""
        return self._state == "open"

    def status(self) -> Status:
        """Return the state of the connections, and of the consumers and their positions."""
        self._check_open()
        return self.monitor.status()

    @property
    def health(self) -> Health:
        """The health, as `/v1/health` of the service reports it."""
        if self._state != "open":
            return Health.FAILED
        if self.fatal is not None:
            return Health.FAILED
        found = self.monitor.status().health
        if found is Health.WAITING:
            found = self._restarter.manager.standby_health
        deaf = self.listener is not None and self.listener.is_open and not self.listener.up
        silent = bool(self._restarter.manager.silence)
        impaired = deaf or silent or self._hub.pressure.stalled
        works = found in (Health.ACTIVE, Health.WAITING)
        return Health.DEGRADED if works and impaired else found

    @property
    def standby_of(self) -> str:
        """The backend that has the lock of the stream, while this instance waits for it."""
        holder = self._restarter.manager.standby_of if self.is_open else None
        return "" if holder is None else who(holder._asdict())

    @property
    def silent_for(self) -> float:
        """Seconds for which the server has not answered the callers' pool; 0.0 if it answers."""
        pool = self._restarter.manager.pools.get(Role.SNAPSHOT) if self.is_open else None
        return 0.0 if pool is None else pool.pool.silent_for

    async def wait_until_active(self, timeout: float | None = None) -> None:
        """Wait until the health is `ACTIVE`; wake the stream if it sleeps.

        Raises `WaitTimeout`, which names the missing conditions, or `ConfigurationError`; and
        `PostgresError` when it is closed meanwhile.
        """
        async with self._awake():
            await self._wait(lambda status: status.health is Health.ACTIVE, timeout)

    async def wait_for_lock(self) -> None:
        """Wait until this instance has the lock of the stream; it does not sleep meanwhile."""
        async with self._awake():
            await self._wait(lambda status: status.conn.has_lock, None)

    async def _wait(self, predicate: Callable[[Status], bool], timeout: float | None) -> None:
        await self._stack.wait_until(
            lambda status: self.fatal is not None or self._state != "open" or predicate(status),
            timeout,
        )
        self._check_works()

    async def events(self) -> AsyncIterator[StackEvent]:
        """Yield events from now on: `ready`, `connection_lock_acquired`, `connection_error`, …"""
        self._check_open()
        async with aclosing(self._stack.events.listen()) as listened:
            async for event in listened:
                yield event

    def statistics(self) -> dict[str, Any]:
        """Return the whole state as plain data, as `/v1/status` of the service shows it."""
        self._check_opened()
        found = report(
            self._stack,
            self._restarter.manager,
            health=self.health,
            fatal=self.fatal,
            restarts=self._restarter.restarts,
        )
        parts = {"listener": self.listener, "outbox": self.outbox}
        return found | {
            **{
                name: None if each is None or not each.is_open else each.statistics()
                for name, each in parts.items()
            },
            "copies": self._copies.progress(),
        }

    def links(self) -> list[Link]:
        """Return what is known about the connections to each server."""
        return links(self._stack, self._restarter.manager, self.listener, self.notify_url)

    def fact(self) -> str:
        """Return in a few words how far the stream is behind; empty while it does not run."""
        return stream_fact(self._stack, self._restarter.manager)

    def hanging(self) -> Callers:
        """Return how many callers of `connection()` wait, for a connection or for an answer."""
        pool = self._restarter.manager.pools.get(Role.SNAPSHOT) if self.is_open else None
        return Callers() if pool is None else pool.pool.reservoir.hanging

    def explain(self) -> str:
        """Return as text what the manager is doing, what it waits for, and what to do about it."""
        text = explain(self.statistics())
        if self.listener is not None and self.listener.is_open:
            text += f"\nlistener {self.listener.explain()}"
        if self.outbox.is_open:
            text += f"\noutbox {self.outbox.explain()}"
        return text

    def tree(self) -> Tree:
        """Return the supervision tree; the owners of the connections show their health in it."""
        self._check_opened()
        return with_health(self._supervisor.tree(), self.health)

    def __repr__(self) -> str:
        if self._state != "open":
            return f"<Postgres {self.settings.stream_id}: {self._state}>"
        return f"<Postgres {self.settings.stream_id}: {self.health.value}, at {self.machine.state}>"

    # -- helpers -------------------------------------------------------------------------------

    def _check_opened(self) -> None:
        """Raise unless it is open, or was open before it was closed."""
        if self._state != "closed" or not hasattr(self, "machine"):
            self._check_open()

    def _check_open(self) -> None:
        if self._state != "open":
            new = self._state in ("new", "opening")
            hint = "use `async with`" if new else "create a new one"
            raise PostgresError(f"{self!r} is not open: {hint}")

    def _check_works(self) -> bool:
        """Return True; raise after a fatal error, and unless it is open."""
        if self.fatal is not None:
            raise ConfigurationError(self.fatal)
        self._check_open()
        return True
