"""Run the connection subsystem: restart it after failures, and scale it to zero.

All connections are closed after a time without use, and opened again for the next use.
Use means a call: a pooled connection, a consumer, an acknowledgement; not the manager's own
queries. Asleep, there is no connection to the server. Only with `max_retained_wal`, a short
connection checks every ten minutes how much WAL the server retains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from moored.kernel import Child, Context, Supervisor, Tasks, describe, duration

from .._errors import PostgresError
from ..report import CONDITIONS
from ..server import _admin
from ._manager import Manager
from ._stack import Stack

__all__ = ["Restarter"]

log = logging.getLogger("moored.postgres")

#: How often the retained WAL is checked while asleep, in seconds.
CHECK_EVERY = 600.0


class Restarter:
    """Stops and starts the connection subsystem, one operation at a time.

    :param on_fatal: called with the text of an error that an operator must correct.
    :param close_others: closes the connections that are not the manager's, to sleep.
    """

    def __init__(
        self,
        stack: Stack,
        on_fatal: Callable[[str], None],
        close_others: Callable[[], Awaitable[None]],
    ) -> None:
        self._stack = stack
        self._clock, self._sleep_after = stack.clock, stack.settings.sleep_after
        self._on_fatal, self._close_others = on_fatal, close_others
        #: The current or the last run; until the first one, a manager that has nothing to report.
        self.manager = Manager(stack, self.used)
        #: How often the subsystem was restarted after a failure.
        self.restarts = 0
        self._users = 0
        self._supervisor: Supervisor | None = None
        self._lock = asyncio.Lock()
        self._tasks = Tasks()
        self._woken = asyncio.Event()
        self._used_at = self._clock.monotonic()
        self.asleep = False

    def child(self) -> Child:
        """Return the connection subsystem as a child of a supervisor."""
        return Supervisor.child(
            "connection",
            children=[Child("restarter", self._run), self._subsystem()],
            strategy="rest_for_one",
            restart="transient",
            significant=True,
            auto_shutdown="any_significant",
        )

    def _subsystem(self) -> Child:
        """Return the manager and its connections, as one child; created again after each sleep."""
        manager = Child(
            "manager",
            self._run_manager,
            restart="transient",
            significant=True,
            shutdown=self._stack.settings.shutdown_timeout + 2.0,
        )
        return Supervisor.child(
            "manager",
            # Children of `connections` are restarted with the manager; when one of them fails, the
            # manager decides what to do.
            children=[Supervisor.child("connections", intensity=None), manager],
            strategy="one_for_all",
            intensity=None,  # a database may be down for days
            restart="transient",
            significant=True,
            auto_shutdown="any_significant",
        )

    async def _run_manager(self, ctx: Context) -> None:
        # Each run finds its own route: the server behind the name may be another one.
        self._stack.resolver.forget()
        self.manager = manager = Manager(self._stack, self.used)
        try:
            await manager.run(ctx)
        except Exception:
            self.restarts += 1
            raise
        finally:
            if manager.fatal is not None:
                self._on_fatal(manager.fatal)

    # -- sleep ---------------------------------------------------------------------------------

    async def _run(self, ctx: Context) -> None:
        """Sleep when idle; wake when the server retains too much WAL."""
        self._supervisor = ctx.supervisor
        ctx.started(self)
        if self.asleep:
            self.asleep = False
            self._changed()
        while True:
            await self._wait_for_check()
            if self.asleep:
                if await self._must_wake():
                    log.info("waking up: the server retains too much WAL for the slot")
                    await self.wake()
            elif self._is_idle():
                await self.sleep()

    def used(self) -> None:
        """Record a use: it restarts the idle time."""
        self._used_at = self._clock.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the connections open while a caller uses one."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.used()

    async def sleep(self) -> None:
        """Close all connections."""
        await self._uninterrupted(self._sleep())

    async def _sleep(self) -> None:
        async with self._lock:
            if self.asleep or self._supervisor is None:
                return
            self.asleep = True
            idle = duration(self._clock.monotonic() - self._used_at)
            log.info("going to sleep after %s without use", idle)
            # The connections are closed on purpose: don't report that as a failure meanwhile.
            self._stack.frozen_status = self._stack.monitor.status()
            await self._supervisor.stop_child("manager")
            await self._close_others()
            self._changed()

    async def wake(self) -> None:
        """Open the connections again; concurrent callers share one start."""
        self.used()
        if self.asleep or self._lock.locked():
            await self._uninterrupted(self._wake())

    async def _uninterrupted(self, work: Coroutine[Any, Any, None]) -> None:
        """Complete the work also if the caller is cancelled."""
        await asyncio.shield(self._tasks.start(work))

    async def _wake(self) -> None:
        async with self._lock:
            if not self.asleep or self._supervisor is None:
                return
            self.asleep = False
            self._woken.set()
            self._changed()
            await self._supervisor.start_child(self._subsystem())

    def _changed(self) -> None:
        """Report that the connections were closed to sleep, or are opened again."""
        stack = self._stack
        stack.asleep, stack.frozen_status = self.asleep, None
        if self.asleep:
            stack.machine.move("connection_setup", cause="the connections were closed to sleep")
        # A change of a condition recomputes the status.
        stack.monitor.clear(CONDITIONS[0], "asleep" if self.asleep else "waking up")
        if self.asleep:
            stack.events.emit("scaled_down_database_connections", "")

    async def _must_wake(self) -> bool:
        """Return whether the server retains more than half of `max_retained_wal`."""
        settings = self._stack.settings
        if (limit := settings.max_retained_wal) is None:
            return False
        try:
            async with await self._stack.connect(settings.connect_timeout) as conn:
                kept = await _admin.retained(conn, settings.slot_name)
        except (psycopg.Error, OSError, PostgresError) as error:
            log.info("the retained WAL could not be queried: %s", describe(error))
            return False
        return kept is not None and kept.bytes > limit / 2

    def _is_idle(self) -> bool:
        if self._sleep_after is None or self._users:
            return False
        return self._clock.monotonic() - self._used_at >= self._sleep_after

    async def _wait_for_check(self) -> None:
        """Wait until the next check is due, or until it wakes."""
        self._woken.clear()
        try:
            async with asyncio.timeout(self._next_check_in()):
                await self._woken.wait()
        except TimeoutError:
            pass

    def _next_check_in(self) -> float:
        if self.asleep or self._sleep_after is None:
            return CHECK_EVERY
        left = self._used_at + self._sleep_after - self._clock.monotonic()
        return max(left, self._sleep_after / 10 if self._users else 0.01)
