"""The connection manager: carries out what its core decides.

It owns the replication client and both pools for one life of the connection subsystem. When that
life ends, for whatever reason, it takes them down in the order that loses nothing, and its
supervisor begins the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from moored.kernel import (
    Backoff,
    Clock,
    Context,
    Deadline,
    Recorder,
    RestartRequested,
    StatusMonitor,
    Timers,
    describe,
    duration,
)

from .._errors import PostgresError, StateError
from .._settings import Settings
from ..consume import Hub, Integrity, Publisher, _backpressure
from ..decode import Shelf
from ..report import CONDITIONS, Outages, Status, lock_words
from ..server import Resolver, _admin, connect, diagnose
from ..stream import KEEPALIVES, ReplicationClient
from ._manager_core import Act, Action, Actions, ManagerCore, Role, Timer
from ._parts import Parts, PostedEvent
from ._pools import ManagedPool, pool_sizes

__all__ = ["Manager", "SubsystemFailed"]

log = logging.getLogger("moored.postgres")

#: How often to look what the server keeps for us.
WATCH_EVERY = 10.0
#: How often, at most, the stream begins again for a consumer that came back.
REWIND_EVERY = 5.0
#: How long the replication client may take to end before its connection is cut.
CLIENT_SHUTDOWN = 1.0


class SubsystemFailed(PostgresError, RestartRequested):
    """The connection subsystem must begin again."""


class Manager:
    """One life of the connection subsystem."""

    def __init__(
        self,
        settings: Settings,
        core: ManagerCore,
        hub: Hub,
        integrity: Integrity,
        monitor: StatusMonitor[Status],
        *,
        clock: Clock,
        recorder: Recorder,
        tell: Callable[[str, str], None],
        outages: Outages,
        resolver: Resolver,
        used: Callable[[], None],
    ) -> None:
        self._resolver = resolver
        self._used = used
        self._settings = settings
        self._core = core
        self._hub = hub
        self._integrity = integrity
        self._monitor = monitor
        self._clock = clock
        self._recorder = recorder
        self._tell = tell
        self._outages = outages
        self._events: asyncio.Queue[Callable[[], Actions]] = asyncio.Queue()
        self._timers = Timers(clock)
        self.client: ReplicationClient | None = None
        self.pools: dict[Role, ManagedPool] = {}
        self._told_unavailable = False
        self._publisher = Publisher(hub, settings)
        self._tables_changed = asyncio.Event()
        self._rewound_at = -REWIND_EVERY
        #: Why it must stop for good, if it must.
        self.fatal: str | None = None
        self.drop_requested = False
        #: What the server keeps for the slot, when it was last looked at.
        self.retained: _admin.Retained | None = None
        self.retained_at = 0.0
        #: Who had the lock, and which transactions a new slot waited for, at the last look.
        self.holder: _admin.LockHolder | None = None
        self.blockers: list[_admin.Blocker] = []
        #: What the clients before this one have received: transactions and bytes.
        self.received_before = (0, 0)

    # -- life ----------------------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Live; returns when it must stop for good, raises when it must begin again."""
        ctx.started(self)
        self._parts = Parts(ctx.supervisor.value("connections"), self._happened)
        self._hub.on_progress = self._progress
        self._hub.on_rewind = self._rewind
        self._hub.on_tables = self._tables_changed.set
        self._hub.pressure.on_change = self._paused
        try:
            await self._live()
        finally:
            await self._shut_down()

    async def _live(self) -> None:
        try:
            await self._carry_out(self._core.start())
            while self.fatal is None:
                event = await self._events.get()
                await self._carry_out(event())
        except SubsystemFailed:
            raise
        except Exception as error:
            # Nothing begins again without a wait: whatever this was, it may fail again at once.
            await self._carry_out(self._core.subsystem_failed(diagnose(error)))

    async def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        match action.act:
            case Act.START_CLIENT:
                await self._start_client()
            case Act.STOP_CLIENT:
                await self._stop_client()
            case Act.START_POOLS:
                await self._start_pools()
            case Act.CHECK_INTEGRITY:
                failed = self._core.subsystem_failed
                await self._parts.start("integrity", self._check_integrity, failed)
            case Act.START_STREAMING:
                assert self.client is not None
                self.client.start_streaming()
                failed = self._core.subsystem_failed
                await self._parts.start("watch", self._watch)
                await self._parts.start("publish", self._keep_published, failed)
            case Act.SET:
                self._monitor.set(action.name, detail=action.detail or None)
            case Act.CLEAR:
                self._monitor.clear(action.name, action.detail)
            case Act.TELL:
                self._told(action.name, action.detail, action.delay)
            case Act.SET_TIMER:
                self._set_timer(action.name, action.delay)
            case Act.CANCEL_TIMER:
                self._timers.cancel(action.name)
            case Act.BREAK_LOCK:
                await self._start_look("lock", self._break_lock)
            case Act.UNBLOCK_SLOT:
                await self._start_look("slot", self._unblock_slot)
            case Act.GIVE_UP:
                self.fatal = action.detail
            case Act.DROP_SLOT:
                await self._begin_anew(action.detail)
            case Act.RESTART:
                await self._pause(action.delay, action.detail)
                raise SubsystemFailed(action.detail)

    def _told(self, name: str, detail: str, wait: float = 0.0) -> None:
        if name == "connection_error":
            self._outages.failed(detail, wait)
            detail = f"{detail}; next try in {duration(wait)}"
        elif name == "ready":
            self._outages.recovered()
        self._tell(name, detail)

    def _happened(self, event: Callable[[], Actions]) -> None:
        self._events.put_nowait(event)

    # -- timers --------------------------------------------------------------------------------

    def _set_timer(self, name: str, delay: float) -> None:
        at = self._clock.monotonic() + delay
        self._timers.set(name, at, lambda: self._happened(lambda: self._core.timer(Timer(name))))

    async def _pause(self, seconds: float, why: str) -> None:
        """Before the next life, from the failure on; the parts are taken down meanwhile."""
        until = self._clock.monotonic() + seconds
        self._core.machine.move("connection_setup", cause=why)
        self._clear_conditions(why)
        try:
            await self._take_down(final=False)
        except Exception as error:
            log.warning("the connection subsystem was not taken down whole: %s", describe(error))
        await asyncio.sleep(max(0.0, until - self._clock.monotonic()))

    # -- the parts -----------------------------------------------------------------------------

    async def _start_client(self) -> None:
        settings, post = self._settings, self._parts.replace("replication")
        self.received_before = self.received()
        if self.client is not None and not self.client.dialled:
            self._resolver.forget()  # the way that was found does not lead there any more
        self.client = ReplicationClient(
            lambda: self._resolver.conninfo(settings.replication_url),
            replace(settings, recreate_slot=settings.recreate_slot and not self._core.configured),
            self._hub,
            dial_options={"application_name": settings.application_name, **KEEPALIVES},
            dial_timeout=settings.connect_timeout,
            shelf=Shelf(settings.state_dir / "spill"),
            clock=self._clock,
            report=lambda step: post(lambda: self._core.client_at(step)),
            first_message=lambda: post(self._core.first_message),
        )
        await self._parts.own("replication", self.client.run, self._core.client_failed, post)

    def received(self) -> tuple[int, int]:
        """What all clients of this life have received: transactions and bytes."""
        transactions, size = self.received_before
        if self.client is None:
            return transactions, size
        return transactions + self.client.received_transactions, size + self.client.received_bytes

    async def _start_pools(self) -> None:
        settings = self._settings
        sizes = pool_sizes(settings.pool_size)
        for role, url, size in (
            (Role.ADMIN, settings.replication_url, sizes.admin),
            (Role.SNAPSHOT, settings.database_url, sizes.snapshot),
        ):
            await self._parts.stop(role.value)
            post = self._parts.replace(role.value)
            self.pools[role] = pool = ManagedPool(
                role,
                partial(self._resolver.conninfo, url),
                size,
                kwargs={"application_name": settings.application_name, **KEEPALIVES},
                clock=self._clock,
                recorder=self._recorder,
                name=f"postgres.{settings.stream_id}",
                on_ready=partial(_posted, post, self._core.pool_ready),
                on_repopulating=partial(_posted, post, self._core.pool_repopulating),
                on_failed=partial(_posted, post, self._core.pool_failed),
            )
            await self._parts.own(role.value, pool.run, self._core.subsystem_failed, post)

    async def _check_integrity(self) -> None:
        assert self.client is not None
        await self._integrity.check(self.client.setup.findings)
        await self._look_at_tables()
        self._happened(self._core.integrity_checked)

    async def _keep_published(self) -> None:
        """Look at the tables of consumers: now and then, and when there is a reason to."""
        # Without jitter: the lock has one holder, and no wait may be longer than the watch.
        pauses = Backoff(1.0, 10.0, clock=self._clock)
        while True:
            waiting = await self._look_at_tables()
            pause = WATCH_EVERY if waiting == [] else pauses.fail()
            if waiting:
                log.warning(
                    "not published yet: %s, which others hold, or which does not exist; next try "
                    "in %s",
                    *(", ".join(waiting), duration(pause)),
                )
            elif waiting is not None:
                pauses.succeed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._tables_changed.wait()

    async def _look_at_tables(self) -> list[str] | None:
        """Publish the tables of consumers; return those that could not be, None if it failed."""
        self._tables_changed.clear()
        try:
            async with self.pools[Role.ADMIN].pool.connection(timeout=WATCH_EVERY) as conn:
                return await self._publisher.look(conn)
        except Exception as error:
            # Nobody is told to begin anew before they were looked at: the stream can go on.
            log.warning("the tables of consumers could not be looked at: %s", describe(error))
            return None

    def _progress(self) -> None:
        self._used()
        if self.client is not None:
            self.client.progress()

    def _paused(self) -> None:
        """Report a consumer that has stopped the others for too long, and when reading goes on."""
        if self._hub.full:
            at = self._clock.monotonic() + _backpressure.STALLED_AFTER
            self._timers.set("stalled", at, self._stalled)
        elif "stalled" in self._timers:
            self._timers.cancel("stalled")
        else:
            self._stalled()

    def _stalled(self) -> None:
        self._happened(lambda: self._core.stalled(self._hub.pressure.stalled))

    def _rewind(self) -> None:
        """A consumer came back for what only the server has: the stream begins again.

        Not all the time: everybody else waits meanwhile, and the lock is let go for a moment. Over
        the same connection, which would keep it, PostgreSQL ends a second logical stream at once.
        """
        if "rewind" not in self._timers:
            self._timers.set("rewind", self._rewound_at + REWIND_EVERY, self._rewind_now)

    def _rewind_now(self) -> None:
        self._rewound_at = self._clock.monotonic()
        self._happened(self._core.rewind)

    # -- while it waits ------------------------------------------------------------------------

    async def _short_connection(self) -> psycopg.AsyncConnection[Any]:
        async with asyncio.timeout(_admin.TIMEOUT):
            return await connect(
                await self._resolver.conninfo(self._settings.replication_url),
                application_name=self._settings.application_name,
            )

    async def _start_look(
        self, name: str, why: Callable[[ReplicationClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Not while the last one is under way: it may be about to find out that nobody answers."""
        if not self._parts.is_running(name):
            await self._parts.start(name, partial(self._look, why))

    async def _look(self, why: Callable[[ReplicationClient], Awaitable[None]]) -> None:
        """Look why it still waits; a server that does not answer has forgotten us, too."""
        client = self.client
        assert client is not None
        try:
            await why(client)
        except TimeoutError:
            client.cut()
            raise

    async def _break_lock(self, client: ReplicationClient) -> None:
        slot, own = self._settings.slot_name, client.setup.findings.backend_pid
        async with await self._short_connection() as conn:
            ended = await _admin.break_lock(conn, slot, own)
            holder = None if ended else await _admin.lock_holder(conn, slot)
        for pid in ended:
            log.warning("the lock of %s was abandoned by backend %s: it was ended", slot, pid)
        if holder is not None and holder.pid == own:
            holder = None  # it is ours by now
        before, self.holder = self.holder, holder
        if holder is None or self._monitor.conditions()["pg_lock_acquired"].met:
            return
        held = ": ".join(lock_words(holder._asdict(), slot))
        self._monitor.clear("pg_lock_acquired", held)
        if before is None or before.pid != holder.pid:
            log.warning(
                "standing by: %s. This instance takes over when that one ends; to have both "
                "stream, give one of them another stream_id (this one has %r)",
                *(held, self._settings.stream_id),
            )

    async def _unblock_slot(self, client: ReplicationClient) -> None:
        own = client.setup.findings.backend_pid
        async with await self._short_connection() as conn:
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
                self._tell("replication_slot_creation_blocked_by_pending_transactions", text)
            try:
                await _admin.log_standby_snapshot(conn)
            except (psycopg.errors.UndefinedFunction, psycopg.errors.InsufficientPrivilege) as e:
                if not self._told_unavailable:
                    self._told_unavailable = True
                    self._tell("replication_slot_unblock_unavailable", str(e))

    async def _watch(self) -> None:
        """Look, now and then, what the server keeps for us, and because of whom."""
        while True:
            try:
                async with self.pools[Role.ADMIN].pool.connection(timeout=WATCH_EVERY) as conn:
                    self.retained = await _admin.retained(conn, self._settings.slot_name)
            except (psycopg.Error, OSError, TimeoutError) as error:
                log.debug("the retained log could not be looked at: %s", describe(error))
            else:
                self.retained_at = self._clock.monotonic()
                await self._limit_retained()
            await asyncio.sleep(WATCH_EVERY)

    async def _limit_retained(self) -> None:
        limit, kept = self._settings.max_retained_wal, self.retained
        if limit is None or kept is None or kept.bytes <= limit:
            return
        # What is kept beyond the lag is kept for transactions that are open, not for consumers.
        slowest = self._hub.slowest() if kept.lag > limit else None
        because = (
            "because a transaction has been open for long, or no checkpoint was made"
            if slowest is None
            else f"for the consumer {slowest!r}"
        )
        text = (
            f"the server keeps {kept.bytes} bytes of log {because}, "
            f"more than max_retained_wal={limit}"
        )
        self._tell("retained_wal_exceeded", text)
        log.warning("%s", text)
        if slowest is not None and self._settings.on_retained_wal == "drop":
            await self._hub.drop(slowest, text)

    # -- the end -------------------------------------------------------------------------------

    async def _begin_anew(self, reason: str) -> None:
        """The slot can never be read again: drop it, and let the next life find nothing."""
        self._clear_conditions(reason)
        await self._stop_client()
        try:
            async with await self._short_connection() as conn:
                await _admin.drop_slot(conn, self._settings.slot_name)
        except Exception as error:
            # The next life meets the same slot, and comes here again.
            log.warning("the slot could not be dropped: %s", describe(error))
        try:
            await self._integrity.forget(reason)
        except StateError as error:
            # The next life finds that the slot is lost, or missing.
            log.warning("%s", error)
        wait = self._core.backoff.fail()
        self._told("connection_error", reason, wait)
        await self._pause(wait, reason)
        raise SubsystemFailed(reason)

    async def _shut_down(self) -> None:
        """The seven steps; whoever closes it while it ends by itself waits for the same end."""
        ending = asyncio.ensure_future(self._shut_down_in_time())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _shut_down_in_time(self) -> None:
        """What is left after its time is cut."""
        deadline = Deadline.after(self._settings.shutdown_timeout, self._clock)
        self._timers.cancel_all()
        # First: from here on the lock may be another's at any moment.
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
        """The parts, in the order that loses nothing; for a new life, without a farewell."""
        await self._parts.stop("publish")
        await self._parts.stop("snapshot")
        if self.drop_requested and not self._settings.manual_publication:
            await self._on_admin(_admin.drop_publication, self._settings.publication_name)
        try:
            await self._hub.save()
        except StateError as error:
            # What was acknowledged since the last save comes again.
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
                await self.client.farewell()
        except Exception as error:
            log.debug("no farewell: %s", describe(error))
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
            log.warning("%s: %s", call.__name__, describe(error))


def _posted(post: Callable[[PostedEvent], None], event: Callable[..., Actions], *args: Any) -> None:
    post(partial(event, *args))
