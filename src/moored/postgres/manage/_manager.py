"""The connection manager: carries out what its core decides.

A `Manager` owns the replication client and both pools for one run of the connection subsystem. When
the run ends, it shuts them down in an order that loses nothing, and its supervisor starts the next
run with a new `Manager`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from moored.kernel import (
    Backoff,
    Context,
    Deadline,
    RestartRequested,
    Timers,
    describe,
    duration,
    sleep_until,
)

from .._errors import PostgresError, StateError, StreamEnded
from ..consume import Publisher, _backpressure, shortened
from ..report import CONDITIONS, LOCKING, Health, lock_words
from ..server import _admin, diagnose
from ..stream import ReplicationClient
from ._forward import forward
from ._manager_core import Act, Action, Actions, Role, Timer
from ._parts import Parts
from ._pools import ManagedPool, PoolStatus, pool_sizes
from ._stack import Stack

__all__ = ["Manager", "SubsystemFailed"]

log = logging.getLogger("moored.postgres")

#: How often the retained WAL of the slot is checked, in seconds.
WATCH_EVERY = 10.0
#: How often the catalog is queried for changes of the consumers' tables, in seconds, and the part
#: of the time that these queries may take at most.
MARKER_EVERY, MARKER_LOAD = 1.0, 0.05
#: The shortest time between two checks of the tables because the stream shows a change, in seconds.
CHECK_PAUSE = 1.0
#: The shortest time between two restarts of the stream for consumers that attach again, in seconds.
REWIND_EVERY = 5.0
#: How long the replication client may take to end before its connection is aborted, in seconds.
CLIENT_SHUTDOWN = 1.0


class SubsystemFailed(PostgresError, RestartRequested):
    """The connection subsystem must be restarted."""


class Manager:
    """One run of the connection subsystem.

    :param used: called when a consumer has made progress, which counts as a use.
    """

    def __init__(self, stack: Stack, used: Callable[[], None]) -> None:
        self._stack = stack
        self._settings, self._clock, self._emit = stack.settings, stack.clock, stack.events.emit
        self._core, self._monitor, self._outages = stack.core, stack.monitor, stack.outages
        self._hub, self._integrity = stack.hub, stack.integrity
        self._used = used
        self._events: asyncio.Queue[Callable[[], Actions]] = asyncio.Queue()
        self._timers = Timers(self._clock)
        self.client: ReplicationClient | None = None
        self.pools: dict[Role, ManagedPool] = {}
        self._unavailable_reported = False
        self._publisher = Publisher(self._hub, self._settings, self._emit)
        self._tables_changed = asyncio.Event()
        # When the stream last led to a check, and how often in a row the catalog was not queried.
        self._shown_at = -CHECK_PAUSE
        self._unqueried = 0
        self._rewound_at = -REWIND_EVERY
        #: The text of a fatal error: it stops for good.
        self.fatal: str | None = None
        #: Whether the slot and the publication are dropped during the shutdown.
        self.drop_requested = False
        #: The WAL that the server retained for the slot at the last query, and when that was.
        self.retained: _admin.Retained | None = None
        self.retained_at = 0.0
        # What had been received then.
        self._seen = 0
        #: The holder of the lock, and the transactions that a new slot waited for, at the last
        #: query.
        self.holder: _admin.LockHolder | None = None
        self.blockers: list[_admin.Blocker] = []

    @property
    def standby_of(self) -> _admin.LockHolder | None:
        """The holder of the lock that this instance waits for; None if it does not, or not yet."""
        return self.holder if self._core.machine.at(LOCKING) else None

    @property
    def standby_health(self) -> Health:
        """The health without the lock: callers have their pool, and the holder has the stream."""
        pool = self.pools.get(Role.SNAPSHOT)
        if self.standby_of is None or pool is None or pool.status is PoolStatus.STARTING:
            return Health.STARTING
        return Health.WAITING if pool.status is PoolStatus.READY else Health.DEGRADED

    @property
    def silence(self) -> str:
        """Which links get no answer of the server; empty if its pools get answers.

        The stream alone may be silent: see `ReplicationClient.silent_for`.
        """
        links = {f"{role.value} pool": each.pool.silent_for for role, each in self.pools.items()}
        if self.client is not None and any(links.values()):
            links["change stream"] = self.client.silent_for
        found = [
            f"the {name} for {duration(seconds)}" for name, seconds in links.items() if seconds
        ]
        return f"the server has not answered {', '.join(found)}" if found else ""

    # -- the run -------------------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Run until a fatal error, and return; raise if the subsystem must be restarted."""
        ctx.started(self)
        self._parts = Parts(ctx.supervisor.value("connections"), self._post_event)
        self._hub.on_progress = self._progress
        self._hub.on_rewind = self._rewind
        self._hub.on_tables = self._tables_changed.set
        self._hub.on_changed_tables = self._check_tables_soon
        self._hub.pressure.on_change = self._paused
        try:
            await self._process_events()
        finally:
            await self._shut_down()

    async def _process_events(self) -> None:
        try:
            await self._carry_out(self._core.start())
            while self.fatal is None:
                event = await self._events.get()
                await self._carry_out(event())
        except SubsystemFailed:
            raise
        except Exception as error:
            # A defect may occur again at once: restart with a backoff.
            await self._carry_out(self._core.subsystem_failed(diagnose(error)))

    async def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        match action.act:
            case Act.START_CLIENT:
                await self._start_client()
            case Act.STOP_CLIENT:
                # Only the instance with the lock may change the publication, or drop consumers.
                await self._parts.stop("publish")
                await self._parts.stop("watch")
                await self._parts.stop("wake")
                await self._stop_client()
            case Act.START_POOL:
                await self._start_pool(Role(action.name))
            case Act.CHECK_INTEGRITY:
                failed = self._core.subsystem_failed
                await self._parts.start("integrity", self._check_integrity, failed)
            case Act.START_STREAMING:
                assert self.client is not None
                self.client.start_streaming()
                failed = self._core.subsystem_failed
                await self._parts.start("watch", self._watch)
                await self._parts.start("wake", partial(forward, self._stack))
                await self._parts.start("publish", self._keep_published, failed)
            case Act.SET:
                self._monitor.set(action.name, detail=action.detail or None)
            case Act.CLEAR:
                self._monitor.clear(action.name, action.detail)
            case Act.EMIT:
                self._emit_event(action.name, action.detail, action.delay)
            case Act.SET_TIMER:
                self._set_timer(action.name, action.delay)
            case Act.CANCEL_TIMER:
                self._timers.cancel(action.name)
            case Act.BREAK_LOCK:
                await self._start_check("lock", self._check_lock)
            case Act.UNBLOCK_SLOT:
                await self._start_check("slot", self._unblock_slot)
            case Act.GIVE_UP:
                self.fatal = action.detail
            case Act.DROP_SLOT:
                await self._drop_lost_slot(action.detail)
            case Act.RESTART:
                await self._pause(action.delay, action.detail)
                raise SubsystemFailed(action.detail)

    def _emit_event(self, name: str, detail: str, wait: float = 0.0) -> None:
        if name == "connection_error":
            self._outages.failed(detail, wait)
            detail = f"{detail}; next try in {duration(wait)}"
        elif name == "ready":
            self._outages.recovered()
        self._emit(name, detail)

    def _post_event(self, event: Callable[[], Actions]) -> None:
        self._events.put_nowait(event)

    # -- timers --------------------------------------------------------------------------------

    def _set_timer(self, name: str, delay: float) -> None:
        at = self._clock.monotonic() + delay
        self._timers.set(name, at, lambda: self._post_event(lambda: self._core.timer(Timer(name))))

    async def _pause(self, seconds: float, why: str) -> None:
        """Stop all children, and wait until so many seconds after the failure."""
        until = self._clock.monotonic() + seconds
        self._core.machine.move("connection_setup", cause=why)
        self._clear_conditions(why)
        try:
            await self._take_down(final=False)
        except Exception as error:
            log.warning("the connection subsystem was not shut down cleanly: %s", describe(error))
        await sleep_until(until, self._clock)

    # -- children ------------------------------------------------------------------------------

    async def _start_client(self) -> None:
        settings, post = self._settings, self._parts.replace("replication")
        self.holder, self.blockers = None, []
        if self.client is not None and not self.client.dialed:
            self._stack.resolver.forget()  # the known route may have stopped working
        self.client = ReplicationClient(
            conninfo=lambda: self._stack.resolver.conninfo(settings.replication_url),
            settings=replace(
                settings, recreate_slot=settings.recreate_slot and not self._core.configured
            ),
            hub=self._hub,
            clock=self._clock,
            report=lambda step: post(lambda: self._core.client_at(step)),
            first_message=lambda: post(self._core.first_message),
            totals=self._stack.totals,
            types=self._stack.types,
            describe_types=self._describe_types,
            published=self._stack.published.add,
        )
        await self._parts.own("replication", self.client.run, self._core.client_failed, post)

    async def _describe_types(self, oids: Collection[int]) -> None:
        timeout = self._settings.connect_timeout
        async with self.pools[Role.ADMIN].pool.connection(timeout=timeout) as conn:
            self._stack.types.add(oids, await _admin.own_types(conn, oids))

    async def _start_pool(self, role: Role) -> None:
        settings = self._settings
        admin, snapshot = pool_sizes(settings.pool_size)
        url, size = {
            Role.ADMIN: (settings.replication_url, admin),
            Role.SNAPSHOT: (settings.database_url, snapshot),
        }[role]
        await self._parts.stop(role.value)
        post = self._parts.replace(role.value)
        self.pools[role] = pool = ManagedPool(self._stack, role, url, size, post)
        await self._parts.own(role.value, pool.run, self._core.subsystem_failed, post)

    async def _check_integrity(self) -> None:
        assert self.client is not None
        await self._integrity.check(self.client.setup.findings)
        await self._publish_tables()
        self._post_event(self._core.integrity_checked)

    async def _keep_published(self) -> None:
        """Publish the consumers' tables: periodically, and when they may have changed."""
        # Without jitter: only one instance has the lock.
        pauses = Backoff(1.0, 10.0, clock=self._clock)
        every, reported = self._settings.check_every, list[str]()
        while True:
            waiting = await self._publish_tables()
            pause = every if waiting == [] else min(every, pauses.fail())
            if waiting is not None:
                self._report_waiting(waiting, reported)
                reported = waiting
            if waiting == []:
                pauses.succeed()
            await self._wait_for_changed_tables(Deadline.after(pause, self._clock))

    def _report_waiting(self, waiting: list[str], reported: list[str]) -> None:
        """Log the tables that are not published if they are others than those at the last time."""
        if waiting and waiting != reported:
            log.warning(
                "not published yet: %s (locked by other sessions, or missing); trying again, and "
                "`explain()` lists the tables of each consumer",
                shortened(waiting),
            )
        elif reported and not waiting:
            log.info("all tables of consumers are published")

    async def _wait_for_changed_tables(self, deadline: Deadline) -> None:
        """Wait until the tables may have changed, but not beyond the deadline."""
        pause = MARKER_EVERY
        while (left := deadline.remaining()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause, left)):
                    await self._tables_changed.wait()
                    return
            if left > pause:
                changed, took = await self._catalog_changed()
                if changed:
                    return
                # A publication of thousands of tables must not load the server.
                pause = max(MARKER_EVERY, took / MARKER_LOAD)

    async def _catalog_changed(self) -> tuple[bool, float]:
        """Return whether the catalog has changed since the last check, and the query's seconds."""
        try:
            async with self.pools[Role.ADMIN].pool.connection(timeout=WATCH_EVERY) as conn:
                began = self._clock.monotonic()
                changed = await self._publisher.changed(conn)
        except Exception as error:
            self._unqueried += 1
            # The first one may be that of a lost connection, which is reported anyway.
            level = logging.WARNING if self._unqueried == 2 else logging.DEBUG
            text = (
                "the catalog cannot be queried for changes, but all tables are checked every %s: %s"
            )
            log.log(level, text, duration(self._settings.check_every), describe(error))
            return False, 0.0
        self._unqueried = 0
        return changed, self._clock.monotonic() - began

    def _check_tables_soon(self) -> None:
        """Check the tables, but not as often as a busy stream shows changes of the schema."""
        if "tables" not in self._timers:
            self._timers.set("tables", self._shown_at + CHECK_PAUSE, self._check_tables_now)

    def _check_tables_now(self) -> None:
        self._shown_at = self._clock.monotonic()
        self._tables_changed.set()

    async def _publish_tables(self) -> list[str] | None:
        """Publish the consumers' tables; return those that could not be, None if it failed."""
        self._tables_changed.clear()
        try:
            async with self.pools[Role.ADMIN].pool.connection(timeout=WATCH_EVERY) as conn:
                return await self._publisher.publish(conn)
        except StreamEnded:
            raise  # the publication does not exist: the stream cannot continue
        except Exception as error:
            # The stream can continue: a Reset is delivered only after a successful check.
            log.warning("the tables of consumers could not be checked: %s", describe(error))
            return None

    def _progress(self) -> None:
        self._used()
        if self.client is not None:
            self.client.progress()

    def _paused(self) -> None:
        """Report a consumer that has stopped all others for too long, and when reading resumes."""
        if self._hub.full:
            at = self._clock.monotonic() + _backpressure.STALLED_AFTER
            self._timers.set("stalled", at, self._stalled)
        elif "stalled" in self._timers:
            self._timers.cancel("stalled")
        else:
            self._stalled()

    def _stalled(self) -> None:
        self._post_event(lambda: self._core.stalled(self._hub.pressure.stalled))

    def _rewind(self) -> None:
        """Restart the stream: a consumer needs transactions that only the server still has.

        At most every `REWIND_EVERY` seconds, because all consumers wait meanwhile and the lock is
        released for a moment. On the same connection, which would keep the lock, PostgreSQL ends a
        second logical stream immediately.
        """
        if "rewind" not in self._timers:
            self._timers.set("rewind", self._rewound_at + REWIND_EVERY, self._rewind_now)

    def _rewind_now(self) -> None:
        self._rewound_at = self._clock.monotonic()
        self._post_event(self._core.rewind)

    # -- checks --------------------------------------------------------------------------------

    async def _start_check(
        self, name: str, why: Callable[[ReplicationClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Start a check unless the last one is still running: it may be about to time out."""
        if not self._parts.is_running(name):
            await self._parts.start(name, partial(self._check, why))

    async def _check(self, why: Callable[[ReplicationClient], Awaitable[None]]) -> None:
        """Run a check; if the server does not answer, the client's connection is dead as well."""
        client = self.client
        assert client is not None
        try:
            await why(client)
        except TimeoutError:
            client.cut()
            raise

    async def _check_lock(self, client: ReplicationClient) -> None:
        """Terminate an abandoned holder of the lock, or report the holder."""
        slot, own = self._settings.slot_name, client.setup.findings.backend_pid
        async with await self._stack.connect(_admin.TIMEOUT) as conn:
            ended = await _admin.break_lock(conn, slot, own)
            holder = None if ended else await _admin.lock_holder(conn, slot)
        for pid in ended:
            log.warning("the lock of %s was abandoned by backend %s: terminated it", slot, pid)
        if holder is not None and holder.pid == own:
            holder = None  # this instance has the lock by now
        before, self.holder = self.holder, holder
        if holder is None or self._monitor.conditions()["pg_lock_acquired"].met:
            return
        held = ": ".join(lock_words(holder._asdict(), slot))
        self._monitor.clear("pg_lock_acquired", held)
        if before is None or before.pid != holder.pid:
            log.warning(
                "standing by: %s. This instance takes over when that one ends; to let both "
                "stream, give one of them another stream_id (this one has %r)",
                *(held, self._settings.stream_id),
            )

    async def _unblock_slot(self, client: ReplicationClient) -> None:
        """Report the transactions that a new slot waits for, and speed up its creation."""
        own = client.setup.findings.backend_pid
        async with await self._stack.connect(_admin.TIMEOUT) as conn:
            queries = self._settings.show_queries
            self.blockers = found = await _admin.blockers(conn, [own], queries=queries)
            for blocker in found:
                log.warning(
                    "the slot waits for a transaction of backend %s, open for %.0f s",
                    blocker.pid,
                    blocker.age,
                )
            if found:
                text = "; ".join(f"pid {b.pid}, {b.age:.0f} s" for b in found)
                self._emit("replication_slot_creation_blocked_by_pending_transactions", text)
            try:
                # It writes the WAL record that a new slot waits for, from PostgreSQL 16 on.
                await _admin.rows(conn, "SELECT pg_log_standby_snapshot()")
            except (psycopg.errors.UndefinedFunction, psycopg.errors.InsufficientPrivilege) as e:
                if not self._unavailable_reported:
                    self._unavailable_reported = True
                    self._emit("replication_slot_unblock_unavailable", str(e))

    async def _watch(self) -> None:
        """Check periodically how much WAL the server retains for the slot."""
        while True:
            try:
                async with self.pools[Role.ADMIN].pool.connection(timeout=WATCH_EVERY) as conn:
                    self.retained = await _admin.retained(conn, self._settings.slot_name)
            except (psycopg.Error, OSError, TimeoutError) as error:
                log.debug("the retained WAL could not be queried: %s", describe(error))
            else:
                self.retained_at = self._clock.monotonic()
                await self._limit_retained()
            await asyncio.sleep(WATCH_EVERY)

    async def _limit_retained(self) -> None:
        limit, kept = self._settings.max_retained_wal, self.retained
        # A consumer has until the next look to acknowledge what it has received before this one.
        due, self._seen = self._seen, self._hub.seen or 0
        if limit is None or kept is None or kept.bytes <= limit:
            return
        # WAL beyond the lag is retained for open transactions, not for consumers.
        slowest = self._hub.slowest(due) if kept.lag > limit else None
        because = (
            "because of a long-running transaction, or because there was no checkpoint"
            if slowest is None
            else f"for the consumer {slowest!r}"
        )
        text = (
            f"the server retains {kept.bytes} bytes of WAL {because}, "
            f"more than max_retained_wal={limit}"
        )
        self._emit("retained_wal_exceeded", text)
        log.warning("%s", text)
        if slowest is not None and self._settings.on_retained_wal == "drop":
            await self._hub.drop(slowest, text)

    # -- shutdown ------------------------------------------------------------------------------

    async def _drop_lost_slot(self, reason: str) -> None:
        """Drop a slot that can never be read again; the next run creates a new one."""
        self._clear_conditions(reason)
        await self._stop_client()
        try:
            async with await self._stack.connect(_admin.TIMEOUT) as conn:
                await _admin.drop_slot(conn, self._settings.slot_name)
        except Exception as error:
            # The next run finds the same slot, and drops it again.
            log.warning("the slot could not be dropped: %s", describe(error))
        try:
            await self._integrity.forget(reason)
        except StateError as error:
            # The next run detects that the slot is lost or missing.
            log.warning("%s", error)
        wait = self._core.backoff.fail()
        self._emit_event("connection_error", reason, wait)
        await self._pause(wait, reason)
        raise SubsystemFailed(reason)

    async def _shut_down(self) -> None:
        """Shut down completely, also if the caller is cancelled meanwhile."""
        ending = asyncio.ensure_future(self._shut_down_in_time())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _shut_down_in_time(self) -> None:
        """Shut down; after `shutdown_timeout`, abort the remaining connections."""
        deadline = Deadline.after(self._settings.shutdown_timeout, self._clock)
        self._timers.cancel_all()
        # First: from here on another instance may get the lock at any moment.
        self._clear_conditions("the connection subsystem stops")
        try:
            async with deadline.enforce("the shutdown"):
                await self._take_down()
        except Exception as error:
            log.warning("the shutdown was cut short: %s", describe(error))

    def _clear_conditions(self, why: str) -> None:
        for condition in CONDITIONS:
            if self._monitor.conditions()[condition].met:
                self._monitor.clear(condition, why)

    async def _take_down(self, *, final: bool = True) -> None:
        """Stop the children in an order that loses nothing.

        :param final: wait until the server has ended the replication backend; not before a restart.
        """
        await self._parts.stop("publish")
        await self._parts.stop("snapshot")
        if self.drop_requested and not self._settings.manual_publication:
            await self._on_admin(_admin.drop_publication, self._settings.publication_name)
        try:
            await self._hub.save()
        except StateError as error:
            # Transactions that were acknowledged since the last save are delivered again.
            log.warning("%s", error)
        await self._stop_client()
        if final and self.client is not None and self.client.setup.findings.backend_pid:
            await self._on_admin(_admin.terminate, self.client.setup.findings.backend_pid)
        if self.drop_requested and not self._settings.temporary_slot:
            await self._on_admin(_admin.drop_slot, self._settings.slot_name)
        await self._parts.stop("admin")
        await self._parts.stop_all()

    async def _stop_client(self) -> None:
        if self.client is None or not self._parts.is_running("replication"):
            return
        try:
            async with asyncio.timeout(CLIENT_SHUTDOWN):
                await self.client.send_final_status()
        except Exception as error:
            log.debug("the final status was not sent: %s", describe(error))
        self._timers.set("cut", self._clock.monotonic() + CLIENT_SHUTDOWN, self.client.cut)
        await self._parts.stop("replication")
        self._timers.cancel("cut")

    async def _on_admin(self, call: Callable[..., Awaitable[None]], argument: Any) -> None:
        pool = self.pools.get(Role.ADMIN)
        if pool is None or pool.pool.closed:
            return
        try:
            async with pool.pool.connection(timeout=1.0) as conn:
                await call(conn, argument)
        except Exception as error:
            log.warning("%s failed during the shutdown: %s", call.__name__, describe(error))
