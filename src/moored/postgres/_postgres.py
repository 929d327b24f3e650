"""The one object for users: a Postgres database whose connections are owned, watched and kept."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import psycopg

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Condition,
    Context,
    Deadline,
    Machine,
    Recorder,
    StatusMonitor,
    Supervisor,
    Tree,
    WaitTimeout,
    describe,
)
from moored.reservoir import PoolClosed

from . import _admin
from ._connect import connect
from ._consumer import Changes
from ._errors import ConfigurationError, PostgresError
from ._explain import explain
from ._health import CONDITIONS, Health, Status, status_of
from ._hub import Hub
from ._integrity import Integrity
from ._manager import Manager
from ._manager_core import ManagerCore, Role
from ._phases import CHART
from ._position import Position
from ._report import Sources, report
from ._resolver import Resolver
from ._restarter import Restarter
from ._settings import Settings
from ._store import StateStore

__all__ = ["Postgres", "StackEvent"]

log = logging.getLogger("moored.postgres")

#: Backoff between lives of the connection subsystem.
BACKOFF = (1.0, 10.0)
EVENTS = 100


class StackEvent(NamedTuple):
    """Something that the whole has to tell."""

    name: str
    detail: str
    #: When, in seconds since 1970.
    wall: float = 0.0


class Postgres:
    """A supervised Postgres: pooled connections, and committed changes that are not lost.

    Use it with `async with`. It starts in the background: `wait_until_active()` waits for it, and
    `connection()` and `changes()` wait by themselves.

    :param database_url: for `connection()`; it may lead to a pooler.
    :param replication_url: the server itself, for replication, lock and administration;
        `database_url`, if not given.
    :param notify_url: the server itself, for the listener; `replication_url`, if not given.
    :param stream_id: one stream, one slot, one lock: another name is another stream.
    :param pool_size: connections of both pools together.
    :param state_dir: where this machine keeps how far its consumers are.
    :param manual_publication: never create or change the publication.
    :param temporary_slot: a slot that ends with its connection: nothing is kept for us meanwhile.
    :param recreate_slot: drop the slot at the start, and with it everything that was not consumed.
    :param failover_slot: have standbys keep a copy of the slot, from PostgreSQL 17 on.
    :param binary: receive values as the server keeps them, from PostgreSQL 14 on; those of types
        that are not built in come as bytes then.
    :param messages: receive what pg_logical_emit_message() writes.
    :param sleep_after: close all connections after so many seconds without use; None never does.
    :param max_retained_wal: bytes of log that the server may keep for us before something is done.
    :param on_retained_wal: "warn", or "drop" the consumer that holds it up, with a `Reset`.
    """

    def __init__(
        self,
        database_url: str,
        *,
        replication_url: str | None = None,
        notify_url: str | None = None,
        stream_id: str = "default",
        pool_size: int = 20,
        state_dir: str | os.PathLike[str] = ".moored",
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
        sleep_after: float | None = None,
        max_retained_wal: int | None = None,
        on_retained_wal: Literal["warn", "drop"] = "warn",
        application_name: str = "moored",
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = Settings(
            database_url=database_url,
            replication_url=replication_url or database_url,
            stream_id=stream_id,
            pool_size=pool_size,
            state_dir=Path(state_dir),
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
            sleep_after=sleep_after,
            max_retained_wal=max_retained_wal,
            on_retained_wal=on_retained_wal,
            application_name=application_name,
        )
        #: Where a listener connects; it is a part of its own.
        self.notify_url = notify_url or self.settings.replication_url
        self._clock = clock
        self._recorder = recorder
        self._state = "new"
        self._fatal: str | None = None

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin, in the background; `async with` does it."""
        if self._state != "new":
            raise PostgresError(f"{self!r} was opened before: make a new one")
        self._state = "open"
        self.clock = self._clock or Clock.current()
        self.recorder = self._recorder or Recorder(clock=self.clock)
        self._asleep = False
        self._kept_status: Status | None = None
        self._restarts = 0
        path = self.settings.state_dir / f"{self.settings.stream_id}.db"
        # Not in a thread: whoever holds this object may use it from the first await on.
        self._store = StateStore(path)
        self._hub = Hub(self._store, self.recorder)
        self._loaded = True
        #: The last events, the oldest first.
        self.last_events: deque[StackEvent] = deque(maxlen=EVENTS)
        self._event_counts: Counter[str] = Counter()
        self._received = (0, 0)
        self._listeners: set[asyncio.Queue[StackEvent | None]] = set()
        self.machine = Machine("postgres", CHART, clock=self.clock, recorder=self.recorder)
        self.monitor: StatusMonitor[Status] = StatusMonitor(
            CONDITIONS,
            self._status_of,
            name="postgres.status",
            clock=self.clock,
            recorder=self.recorder,
        )
        self._core = ManagerCore(self.machine, Backoff(*BACKOFF, jitter="half", clock=self.clock))
        self._integrity = Integrity(self._store, self._hub, self._tell)
        self._manager: Manager | None = None
        self._resolver = Resolver(timeout=self.settings.connect_timeout)
        self._in_use = 0
        self._wakes: set[asyncio.Task[None]] = set()
        self._restarter = Restarter(
            self._connection_child,
            clock=self.clock,
            sleep_after=self.settings.sleep_after,
            busy=lambda: self._in_use > 0,
            goes_to_sleep=self._goes_to_sleep,
            changed=self._slept_or_woke,
            must_wake=self._must_wake,
        )
        self._supervisor = self._tree()
        await self._supervisor.start()

    def _tree(self) -> Supervisor:
        """The tree of the seed: the persistent side stays while the connections come and go."""
        connection = Supervisor.child(
            "connection",
            children=[Child("restarter", self._restarter.run), self._connection_child()],
            strategy="rest_for_one",
            restart="transient",
            significant=True,
            auto_shutdown="any_significant",
        )
        return Supervisor(
            "postgres",
            children=[Child("persistent", self._run_persistent), connection],
            auto_shutdown="any_significant",
            recorder=self.recorder,
            clock=self.clock,
        )

    def _connection_child(self) -> Child:
        """The manager and what goes down with it: made anew after each sleep."""
        manager = Child(
            "manager",
            self._run_manager,
            restart="transient",
            significant=True,
            shutdown=self.settings.shutdown_timeout + 2.0,
        )
        return Supervisor.child(
            "manager",
            children=[Child("resolver", self._run_resolver), manager],
            strategy="one_for_all",
            intensity=None,  # a database may be away for days
            restart="transient",
            significant=True,
            auto_shutdown="any_significant",
        )

    async def _run_resolver(self, ctx: Context) -> None:
        # Each life finds its own way: the server behind the name may be another one.
        self._resolver.forget()
        ctx.started(self._resolver)
        await asyncio.Event().wait()

    async def _run_persistent(self, ctx: Context) -> None:
        ctx.started(self._hub)
        await asyncio.Event().wait()

    async def _run_manager(self, ctx: Context) -> None:
        manager = Manager(
            self.settings,
            self._core,
            self._hub,
            self._integrity,
            self.monitor,
            clock=self.clock,
            recorder=self.recorder,
            tell=self._tell,
            resolver=self._resolver,
            used=self._restarter.used,
        )
        if self._manager is not None:
            before, more = self._received, self._manager.received()
            self._received = (before[0] + more[0], before[1] + more[1])
        self._manager = manager
        try:
            await manager.run(ctx)
        except Exception:
            self._restarts += 1
            raise
        finally:
            if manager.fatal is not None:
                self._fail(manager.fatal)

    def _fail(self, text: str) -> None:
        self._fatal = text
        log.error("%s", text)
        self._hub.end(ConfigurationError(text))
        self.monitor.clear(CONDITIONS[0], text)

    async def close(self) -> None:
        """Stop everything in order, within its time."""
        if self._state != "open":
            self._state = "closed"
            return
        self._state = "closed"
        self._hub.end(None)
        await self._supervisor.stop()
        for queue in self._listeners:
            queue.put_nowait(None)
        await asyncio.to_thread(self._store.close)

    async def drop(self) -> None:
        """Close, and drop slot and publication: nothing is kept for this stream any more.

        Asleep, it wakes up first: it takes a connection to drop them. If that cannot be had, or
        another instance reads the slot, it raises.
        """
        self._check_open()
        if self._restarter.asleep:
            await self.wait_until_active(self.settings.connect_timeout)
        if self._manager is not None:
            self._manager.drop_requested = True
        await self.close()
        await self._drop_what_is_left()

    async def _drop_what_is_left(self) -> None:
        """Without the lock, or before the pools were there, the manager could not."""
        settings = self.settings
        try:
            async with asyncio.timeout(_admin.TIMEOUT), self._direct() as conn:
                # The slot first: while another instance reads it, nothing must be taken from it.
                await _admin.drop_slot(conn, settings.slot_name)
                if not settings.manual_publication:
                    await _admin.drop_publication(conn, settings.publication_name)
        except (psycopg.Error, OSError, PostgresError) as error:
            raise PostgresError(
                f"the slot {settings.slot_name} could not be dropped: {describe(error)}"
            ) from error

    @asynccontextmanager
    async def _direct(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        conninfo = await self._resolver.conninfo(self.settings.replication_url)
        async with await connect(conninfo) as conn:
            yield conn

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- use -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def connection(
        self, timeout: float = 30.0
    ) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """A pooled connection; at the end its transaction is committed, or rolled back."""
        deadline = Deadline.after(timeout, self.clock)
        self._in_use += 1
        try:
            checkout, conn = await self._checked_out(deadline)
            async with checkout:
                yield conn
        finally:
            self._in_use -= 1
            self._restarter.used()

    async def _checked_out(
        self, deadline: Deadline
    ) -> tuple[AsyncExitStack, psycopg.AsyncConnection[Any]]:
        """A connection of the pool there is; when that one is closed meanwhile, of the next."""
        while True:
            await self.wake()
            await self._wait_for("snapshot_connection_pool_ready", deadline)
            assert self._manager is not None
            pool = self._manager.pools[Role.SNAPSHOT].pool
            async with AsyncExitStack() as stack:
                try:
                    conn = await stack.enter_async_context(
                        pool.connection(timeout=deadline.remaining())
                    )
                except PoolClosed:
                    deadline.check("getting a connection")
                    continue
                return stack.pop_all(), conn

    def changes(
        self,
        consumer: str = "default",
        *,
        tables: tuple[str, ...] | list[str] = (),
        start: Position | str | None = None,
    ) -> Changes:
        """Committed transactions, in commit order, at least once: `async for txn in …`.

        :param consumer: its name: under it the database remembers, also while it is away.
        :param tables: the tables that it wants; they are published. None for all that are.
        :param start: a position that it kept by itself: transactions after it come.
        """
        self._check_open()
        if self._fatal is not None:
            raise ConfigurationError(self._fatal)
        if isinstance(start, str):
            start = Position.parse(start)
        self._wake_soon()
        return self._hub.attach(consumer, tables=tuple(tables), start=start)

    async def wait_until_published(self, *tables: str, timeout: float = 30.0) -> None:
        """Wait until the tables of the consumers are published: changes before that are nobody's.

        Without names, it waits for the tables of every consumer that is here.
        """
        deadline = Deadline.after(timeout, self.clock)
        await self.wait_until_active(deadline.timeout)
        async with deadline.enforce("publishing"):
            await self._hub.published(tables)

    async def drop_consumer(self, name: str) -> None:
        """A consumer does not come back: nothing is kept for it any more."""
        self._check_open()
        await self._hub.drop(name)

    async def sleep(self) -> None:
        """Close all connections now; the next use opens them again."""
        self._check_open()
        await self._restarter.sleep()

    async def wake(self) -> None:
        """Open the connections again, if they were closed for lack of use."""
        self._check_open()
        await self._restarter.wake()

    def _wake_soon(self) -> None:
        self._restarter.used()
        if self._restarter.asleep:
            task = asyncio.get_running_loop().create_task(self._restarter.wake())
            self._wakes.add(task)
            task.add_done_callback(self._wakes.discard)

    def _goes_to_sleep(self) -> None:
        # What is lost from here on is lost on purpose: that is no failure on the way.
        self._kept_status = self.monitor.status()

    def _slept_or_woke(self, asleep: bool) -> None:
        self._asleep, self._kept_status = asleep, None
        if asleep:
            self.machine.move("connection_setup", cause="it was closed for lack of use")
        # The status is computed anew with the next word about a condition.
        self.monitor.clear(CONDITIONS[0], "asleep" if asleep else "waking up")
        if asleep:
            self._tell("scaled_down_database_connections", "")

    async def _must_wake(self) -> bool:
        """Whether the server keeps more log for us, asleep, than it may."""
        limit = self.settings.max_retained_wal
        if limit is None:
            return False
        try:
            async with asyncio.timeout(self.settings.connect_timeout), self._direct() as conn:
                kept = await _admin.retained(conn, self.settings.slot_name)
        except (psycopg.Error, OSError, PostgresError) as error:
            log.info("the retained log could not be looked at: %s", describe(error))
            return False
        return kept is not None and kept.bytes > limit / 2

    # -- how it is -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._state == "open"

    @property
    def fatal(self) -> str | None:
        """What must be changed before it can work; None if it needs no help."""
        return self._fatal

    def status(self) -> Status:
        """How the connections and the persistent part are."""
        self._check_open()
        return self.monitor.status()

    @property
    def health(self) -> Health:
        """How it is, in one word."""
        if self._state != "open":
            return Health.FAILED
        return Health.FAILED if self._fatal is not None else self.monitor.status().health

    async def wait_until_active(self, timeout: float | None = None) -> None:
        """Wait until everything works; raises what must be changed, or what is missing.

        Asleep, it is woken up.
        """
        await self.wake()
        await self._wait(lambda status: status.health is Health.ACTIVE, timeout)

    async def _wait_for(self, condition: str, deadline: Deadline) -> None:
        def met(status: Status) -> bool:
            return self.monitor.conditions()[condition].met

        self._check_open()
        await self._wait(met, deadline.timeout)

    async def _wait(self, predicate: Any, timeout: float | None) -> None:
        try:
            await self.monitor.wait_until(
                lambda status: self._fatal is not None or predicate(status), timeout
            )
        except WaitTimeout as error:
            at = f"{self.machine.phase} / {self.machine.step.replace(':', ' / ')}"
            raise WaitTimeout(f"{error}; it is at {at}") from None
        if self._fatal is not None:
            raise ConfigurationError(self._fatal)

    async def events(self) -> AsyncIterator[StackEvent]:
        """What happens from now on: `ready`, `connection_lock_acquired`, `connection_error`, …"""
        self._check_open()
        queue: asyncio.Queue[StackEvent | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

    def statistics(self) -> dict[str, Any]:
        """Everything, as JSON can hold it: the same that `/v1/status` of the service shows."""
        self._check_opened()
        before = self._manager.received_before if self._manager is not None else (0, 0)
        return report(
            Sources(
                settings=self.settings,
                clock=self.clock,
                machine=self.machine,
                monitor=self.monitor,
                health=self.health,
                fatal=self._fatal,
                manager=self._manager,
                consumers=self._hub.consumers(),
                events=self.last_events,
                counts=self._event_counts,
                received=(self._received[0] + before[0], self._received[1] + before[1]),
                restarts=self._restarts,
            )
        )

    def explain(self) -> str:
        """What it is doing, why it is not further, and what can be done about it, in words."""
        return explain(self.statistics())

    def tree(self) -> Tree:
        """The supervision tree, as it is now."""
        self._check_opened()
        return self._supervisor.tree()

    def __repr__(self) -> str:
        if self._state != "open":
            return f"<Postgres {self.settings.stream_id}: {self._state}>"
        return f"<Postgres {self.settings.stream_id}: {self.health.value}, at {self.machine.state}>"

    # -- small things --------------------------------------------------------------------------

    def _status_of(self, conditions: Mapping[str, Condition]) -> Status:
        if self._kept_status is not None:
            return self._kept_status
        return status_of(conditions, asleep=self._asleep, loaded=self._loaded)

    def _tell(self, name: str, detail: str) -> None:
        event = StackEvent(name, detail, self.clock.wall())
        self.last_events.append(event)
        self._event_counts[name] += 1
        for queue in self._listeners:
            queue.put_nowait(event)
        self.recorder.record("postgres", name, kind="info", cause=detail or None)

    def _check_opened(self) -> None:
        """What can be looked at also when it is closed."""
        if self._state != "closed" or not hasattr(self, "machine"):
            self._check_open()

    def _check_open(self) -> None:
        if self._state != "open":
            hint = "use `async with`" if self._state == "new" else "it is closed: make a new one"
            raise PostgresError(f"{self!r} is not open: {hint}")
