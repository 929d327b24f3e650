"""The connection manager: carries out what its core decides.

It owns the replication client and both pools for one life of the connection subsystem. When that
life ends, for whatever reason, it takes them down in the order that loses nothing, and its
supervisor begins the next one.
"""

from __future__ import annotations

import asyncio
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
    StatusMonitor,
    describe,
    duration,
)

from . import _admin
from ._body import Shelf
from ._connect import connect
from ._consumer import Changes
from ._errors import PostgresError
from ._explain import lock_words
from ._faults import Diagnosis, diagnose
from ._health import CONDITIONS, Status
from ._hub import Hub
from ._integrity import Integrity
from ._link import KEEPALIVES
from ._manager_core import Act, Action, Actions, ManagerCore, Role, Timer
from ._pools import ManagedPool, pool_sizes
from ._replication import ReplicationClient
from ._resolver import Resolver
from ._settings import Settings

__all__ = ["Manager", "SubsystemFailed"]

log = logging.getLogger("moored.postgres")

#: How often to look what the server keeps for us.
WATCH_EVERY = 10.0
#: How long the replication client may take to end before its connection is cut.
CLIENT_SHUTDOWN = 1.0


class SubsystemFailed(PostgresError):
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
        self._events: asyncio.Queue[Callable[[], Actions]] = asyncio.Queue()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.client: ReplicationClient | None = None
        self.pools: dict[Role, ManagedPool] = {}
        self._told_unavailable = False
        self._publishing = asyncio.Lock()
        #: Why it must stop for good, if it must.
        self.fatal: str | None = None
        self.drop_requested = False
        #: What the server keeps for the slot, when it was last looked at.
        self.retained: _admin.Retained | None = None
        self.retained_at = 0.0
        #: Who had the lock, and which transactions a new slot waited for, at the last look.
        self.holder: _admin.Holder | None = None
        self.blockers: list[_admin.Blocker] = []
        #: What the clients before this one have received: transactions and bytes.
        self.received_before = (0, 0)

    # -- life ----------------------------------------------------------------------------------

    async def run(self, ctx: Context) -> None:
        """Live; returns when it must stop for good, raises when it must begin again."""
        ctx.started(self)
        self._hub.on_progress = self._progress
        self._hub.on_rewind = self._rewind
        self._hub.on_attach = self._publish
        try:
            await self._carry_out(self._core.start())
            while self.fatal is None:
                event = await self._events.get()
                await self._carry_out(event())
        finally:
            await self._shut_down()

    async def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            await self._do(action)

    async def _do(self, action: Action) -> None:
        match action.act:
            case Act.START_CLIENT:
                self._start_client()
            case Act.STOP_CLIENT:
                await self._stop_client()
            case Act.START_POOLS:
                self._start_pools()
            case Act.CHECK_INTEGRITY:
                self._start("integrity", self._check_integrity(), self._core.subsystem_failed)
            case Act.START_STREAMING:
                assert self.client is not None
                self.client.start_streaming()
                self._start("watch", self._watch(), None)
            case Act.SET:
                self._monitor.set(action.name, detail=action.detail or None)
            case Act.CLEAR:
                self._monitor.clear(action.name, action.detail)
            case Act.TELL:
                self._tell(action.name, action.detail)
            case Act.SET_TIMER:
                self._set_timer(action.name, action.delay)
            case Act.CANCEL_TIMER:
                self._cancel_timer(action.name)
            case Act.BREAK_LOCK:
                self._start_look("lock", self._break_lock)
            case Act.UNBLOCK_SLOT:
                self._start_look("slot", self._unblock_slot)
            case Act.GIVE_UP:
                self.fatal = action.detail
            case Act.DROP_SLOT:
                await self._begin_anew(action.detail)
            case Act.RESTART:
                await self._pause(action.delay, action.detail)
                raise SubsystemFailed(action.detail)

    def _happened(self, event: Callable[[], Actions]) -> None:
        self._events.put_nowait(event)

    def _start(
        self,
        name: str,
        work: Coroutine[Any, Any, None],
        failed: Callable[[Diagnosis], Actions] | None,
    ) -> None:
        """Run a part beside this; its failure is an event, or only a line in the log.

        A part that was replaced meanwhile has nothing to say any more.
        """

        def fail(diagnosis: Diagnosis) -> Actions:
            current = self._tasks.get(name) is task
            return failed(diagnosis) if failed is not None and current else []

        async def watched() -> None:
            try:
                await work
            except Exception as error:
                if failed is None:
                    log.warning("%s: %s", name, describe(error))
                    return
                diagnosis = diagnose(_first(error))
                self._recorder.record(f"postgres.{name}", "failed", kind="failure", cause=error)
                self._happened(lambda: fail(diagnosis))

        if (former := self._tasks.get(name)) is not None:
            former.cancel()
        task = asyncio.get_running_loop().create_task(watched(), name=f"pg-{name}")
        # One that is cancelled before its first step has never touched its work.
        task.add_done_callback(lambda _: work.close())
        self._tasks[name] = task

    # -- timers --------------------------------------------------------------------------------

    def _set_timer(self, name: str, delay: float) -> None:
        self._cancel_timer(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(
            delay, self._happened, lambda: self._core.timer(Timer(name))
        )

    def _cancel_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    async def _pause(self, seconds: float, why: str) -> None:
        """Before the next life; the parts are down meanwhile."""
        self._core.machine.move("connection_setup", cause=why)
        self._clear_conditions("the connection subsystem begins again")
        await self._take_down(final=False)
        await asyncio.sleep(seconds)

    # -- the parts -----------------------------------------------------------------------------

    def _start_client(self) -> None:
        settings = self._settings
        self.received_before = self.received()
        if self.client is not None and not self.client.dialled:
            self._resolver.forget()  # the way that was found does not lead there any more
        self.client = client = ReplicationClient(
            lambda: self._resolver.conninfo(settings.replication_url),
            replace(
                settings.stream,
                recreate_slot=settings.recreate_slot and not self._core.configured,
            ),
            self._hub,
            dial_options={"application_name": settings.application_name, **KEEPALIVES},
            dial_timeout=settings.connect_timeout,
            shelf=Shelf(settings.state_dir / "spill"),
            clock=self._clock,
            report=lambda step: self._of(client, lambda: self._core.client_at(step)),
            first_message=lambda: self._of(client, self._core.first_message),
        )
        self._start("replication", client.run(), self._core.client_failed)

    def received(self) -> tuple[int, int]:
        """What all clients of this life have received: transactions and bytes."""
        transactions, size = self.received_before
        if self.client is None:
            return transactions, size
        return transactions + self.client.received_transactions, size + self.client.received_bytes

    def _of(self, client: ReplicationClient, event: Callable[[], Actions]) -> None:
        """An event of a replication client, unless that one was replaced meanwhile."""
        self._happened(lambda: event() if self.client is client else [])

    def _start_pools(self) -> None:
        settings = self._settings
        sizes = pool_sizes(settings.pool_size)
        for role, url, size in (
            (Role.ADMIN, settings.replication_url, sizes.admin),
            (Role.SNAPSHOT, settings.database_url, sizes.snapshot),
        ):
            pool = ManagedPool(
                role,
                partial(self._resolver.conninfo, url),
                size,
                kwargs={"application_name": settings.application_name, **KEEPALIVES},
                clock=self._clock,
                recorder=self._recorder,
                name=f"postgres.{settings.stream_id}",
                on_ready=lambda role: self._happened(lambda: self._core.pool_ready(role)),
                on_repopulating=self._pool_repopulating,
                on_failed=self._pool_failed,
            )
            self.pools[role] = pool
            self._start(role.value, pool.run(), self._core.subsystem_failed)

    def _pool_repopulating(self, role: Role, why: str) -> None:
        self._happened(lambda: self._core.pool_repopulating(role, why))

    def _pool_failed(self, role: Role, diagnosis: Diagnosis) -> None:
        self._happened(lambda: self._core.pool_failed(role, diagnosis))

    async def _check_integrity(self) -> None:
        assert self.client is not None
        await self._integrity.check(self.client.setup.findings)
        for changes in self._hub.attached():
            if not await self._publish_now(changes):
                self._publish(changes)
        self._happened(self._core.integrity_checked)

    def _publish(self, changes: Changes) -> None:
        """See to the tables of a consumer, from the checks on, which see to those before."""
        if changes.tables and "integrity" in self._tasks:
            work = self._publish_in_time(changes)
            self._start(f"publish {changes.name}", work, self._core.subsystem_failed)

    async def _publish_in_time(self, changes: Changes) -> None:
        """A table that others write to all the time is tried again and again; only it waits."""
        pauses = Backoff(1.0, 10.0, jitter="half", clock=self._clock)
        while not await self._publish_now(changes):
            pause = pauses.fail()
            log.warning(
                "the tables of the consumer %r are not published yet: others are writing to them; "
                "next try in %s",
                *(changes.name, duration(pause)),
            )
            await asyncio.sleep(pause)

    async def _publish_now(self, changes: Changes) -> bool:
        """See to it that the tables of a consumer are published; if they cannot be, it is told.

        Returns whether that is so; not, if a table could not be locked.
        """
        publication, added = self._settings.publication_name, []
        if not changes.tables:
            return True
        # One at a time: two that publish the same table would wait for each other.
        async with self._publishing, self.pools[Role.ADMIN].pool.connection() as conn:
            await conn.set_autocommit(True)
            try:
                if not self._settings.manual_publication:
                    added = await _admin.add_tables(conn, publication, changes.tables)
                for each in {*self._hub.published_to(), changes}:
                    missing = await _admin.unpublished(conn, publication, each.tables)
                    if missing:
                        self._hub.refuse(each, _words_of_missing(missing, publication))
                        if each is changes:
                            return True
            except psycopg.errors.LockNotAvailable:
                return False
            except (
                psycopg.ProgrammingError,
                psycopg.NotSupportedError,
                psycopg.DataError,  # it is no table, or an unlogged one
            ) as error:
                self._hub.refuse(changes, f"its tables cannot be published: {describe(error)}")
                return True
            finally:
                await conn.set_autocommit(False)
        for table in added:
            log.info("the table %s is published from now on", table)
        self._hub.note_published(changes.tables)
        return True

    def _progress(self) -> None:
        self._used()
        if self.client is not None:
            self.client.progress()

    def _rewind(self) -> None:
        """A consumer came back for what only the server has: the stream begins again."""
        self._happened(self._core.rewind)

    # -- while it waits ------------------------------------------------------------------------

    async def _short_connection(self) -> psycopg.AsyncConnection[Any]:
        async with asyncio.timeout(_admin.TIMEOUT):
            return await connect(
                await self._resolver.conninfo(self._settings.replication_url),
                application_name=self._settings.application_name,
            )

    def _start_look(
        self, name: str, why: Callable[[ReplicationClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Not while the last one is under way: it may be about to find out that nobody answers."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._start(name, self._look(why), None)

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
        self.holder = holder
        if holder is not None and not self._monitor.conditions()["pg_lock_acquired"].met:
            self._monitor.clear("pg_lock_acquired", ": ".join(lock_words(holder._asdict(), slot)))

    async def _unblock_slot(self, client: ReplicationClient) -> None:
        own = client.setup.findings.backend_pid
        async with await self._short_connection() as conn:
            self.blockers = found = await _admin.blockers(conn, [own])
            for blocker in found:
                log.warning(
                    "the slot waits for a transaction of backend %s, open for %.0f s: %s",
                    *blocker,
                )
            if found:
                text = "; ".join(f"pid {b.pid}, {b.age:.0f} s: {b.query}" for b in found)
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
        await self._integrity.forget(reason)
        await self._pause(self._core.backoff.fail(), reason)
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
        for timer in list(self._timers):
            self._cancel_timer(timer)
        # First: from here on the lock may be another's at any moment.
        self._clear_conditions("the connection subsystem stops")
        try:
            async with deadline.enforce("the shutdown"):
                await self._take_down()
        except Exception as error:
            log.warning("the shutdown was cut short: %s", describe(error))
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _clear_conditions(self, why: str) -> None:
        for condition in CONDITIONS:
            if self._monitor.conditions()[condition].met:
                self._monitor.clear(condition, why)

    async def _take_down(self, *, final: bool = True) -> None:
        """The parts, in the order that loses nothing; for a new life, without a farewell."""
        await self._stop("snapshot")
        if self.drop_requested and not self._settings.manual_publication:
            await self._on_admin(_admin.drop_publication, self._settings.publication_name)
        await self._hub.save()
        await self._stop_client()
        if final and self.client is not None and self.client.setup.findings.backend_pid:
            await self._on_admin(_admin.terminate, self.client.setup.findings.backend_pid)
        if self.drop_requested and not self._settings.temporary_slot:
            await self._on_admin(_admin.drop_slot, self._settings.slot_name)
        await self._stop("admin")
        for name in list(self._tasks):
            await self._stop(name)

    async def _stop_client(self) -> None:
        task = self._tasks.get("replication")
        if self.client is not None and task is not None and not task.done():
            try:
                async with asyncio.timeout(CLIENT_SHUTDOWN):
                    await self.client.farewell()
            except Exception as error:
                log.debug("no farewell: %s", describe(error))
        await self._stop("replication", CLIENT_SHUTDOWN)

    async def _stop(self, name: str, patience: float = 5.0) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait({task}, timeout=patience)
        if not task.done() and name == "replication" and self.client is not None:
            self.client.cut()
            await asyncio.wait({task}, timeout=patience)

    async def _on_admin(self, call: Callable[..., Awaitable[None]], argument: Any) -> None:
        pool = self.pools.get(Role.ADMIN)
        if pool is None or pool.pool.closed:
            return
        try:
            async with pool.pool.connection(timeout=1.0) as conn:
                await call(conn, argument)
        except Exception as error:
            log.warning("%s: %s", call.__name__, describe(error))


def _first(error: Exception) -> BaseException:
    """The error that matters: a group of tasks wraps what one of them raised."""
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _words_of_missing(tables: list[str], publication: str) -> str:
    named = " and ".join(tables)
    return (
        f"the publication {publication} does not tell the changes of {named} under that name. Add "
        "the table to it; those of a partition come under the name of the partitioned table, if "
        "that is published, too, and those of a partitioned table need "
        "publish_via_partition_root = true"
    )
