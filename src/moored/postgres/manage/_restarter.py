"""Scale to zero: close all connections after a time without use, and open them for the next use.

Use means a call: a pooled connection, a consumer, an acknowledgement; not the manager's own
queries. Asleep, there is no connection to the server. Only with `max_retained_wal`, a short
connection checks every ten minutes how much WAL the server retains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from moored.kernel import Child, Clock, Context, Supervisor, Tasks, duration

__all__ = ["Restarter"]

log = logging.getLogger("moored.postgres")

#: How often the retained WAL is checked while asleep, in seconds.
CHECK_EVERY = 600.0


class Restarter:
    """Stops and starts the connection subsystem, one operation at a time.

    :param make: creates the child that owns the connections.
    :param busy: returns whether a caller uses a connection.
    :param on_sleep: called before the connections are closed.
    :param on_change: called with whether it is asleep, when that has changed.
    :param must_wake: async; returns whether it must wake because of the retained WAL.
    """

    def __init__(
        self,
        make: Callable[[], Child],
        *,
        clock: Clock,
        sleep_after: float | None,
        busy: Callable[[], bool],
        on_sleep: Callable[[], None],
        on_change: Callable[[bool], None],
        must_wake: Callable[[], Any],
    ) -> None:
        self._make = make
        self._clock = clock
        self._sleep_after = sleep_after
        self._busy = busy
        self._on_sleep = on_sleep
        self._on_change = on_change
        self._must_wake = must_wake
        self._supervisor: Supervisor | None = None
        self._lock = asyncio.Lock()
        self._tasks = Tasks()
        self._woken = asyncio.Event()
        self._used_at = clock.monotonic()
        self.asleep = False

    async def run(self, ctx: Context) -> None:
        """Sleep when idle; wake when the server retains too much WAL."""
        self._supervisor = ctx.supervisor
        ctx.started(self)
        if self.asleep:
            self.asleep = False
            self._on_change(False)
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
            self._on_sleep()
            await self._supervisor.stop_child("manager")
            self._on_change(True)

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
            self._on_change(False)
            await self._supervisor.start_child(self._make())

    def _is_idle(self) -> bool:
        if self._sleep_after is None or self._busy():
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
        return max(left, self._sleep_after / 10 if self._busy() else 0.01)
