"""Scale to zero: all connections are closed while nobody needs them, and come back when one does.

Use is a caller's: a pooled connection, an acknowledgement. What the
manager does for itself is none. While it sleeps there is nothing of it at the server; only if a
limit for the retained log is set does it look, now and then, whether that is near.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from moored.kernel import Child, Clock, Context, Supervisor, Tasks, duration

__all__ = ["Restarter"]

log = logging.getLogger("moored.postgres")

#: How often to look, asleep or never to sleep, whether something must be done.
CHECK_EVERY = 600.0


class Restarter:
    """Stops and restores the connection subsystem, one flight at a time."""

    def __init__(
        self,
        make: Callable[[], Child],
        *,
        clock: Clock,
        sleep_after: float | None,
        busy: Callable[[], bool],
        goes_to_sleep: Callable[[], None],
        changed: Callable[[bool], None],
        must_wake: Callable[[], Any],
    ) -> None:
        self._make = make
        self._clock = clock
        self._sleep_after = sleep_after
        self._busy = busy
        self._goes_to_sleep = goes_to_sleep
        self._changed = changed
        self._must_wake = must_wake
        self._supervisor: Supervisor | None = None
        self._turn = asyncio.Lock()
        self._tasks = Tasks()
        self._woken = asyncio.Event()
        self._used_at = clock.monotonic()
        self.asleep = False

    async def run(self, ctx: Context) -> None:
        """Watch for idleness, and for what must wake it."""
        self._supervisor = ctx.supervisor
        ctx.started(self)
        if self.asleep:
            self.asleep = False
            self._changed(False)
        while True:
            await self._until_next_look()
            if self.asleep:
                if await self._must_wake():
                    log.info("waking up: the server keeps too much log for us")
                    await self.wake()
            elif self._is_idle():
                await self.sleep()

    def used(self) -> None:
        """Somebody needs the database."""
        self._used_at = self._clock.monotonic()

    async def sleep(self) -> None:
        """Close all connections."""
        await self._to_its_end(self._sleep())

    async def _sleep(self) -> None:
        async with self._turn:
            if self.asleep or self._supervisor is None:
                return
            self.asleep = True
            idle = duration(self._clock.monotonic() - self._used_at)
            log.info("going to sleep after %s without use", idle)
            self._goes_to_sleep()
            await self._supervisor.stop_child("manager")
            self._changed(True)

    async def wake(self) -> None:
        """Open them again; for many callers at once it happens once."""
        self.used()
        if self.asleep or self._turn.locked():
            await self._to_its_end(self._wake())

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it whole, also if whoever asked for it does not wait: a half of it is no state."""
        await asyncio.shield(self._tasks.start(work))

    async def _wake(self) -> None:
        async with self._turn:
            if not self.asleep or self._supervisor is None:
                return
            self.asleep = False
            self._woken.set()
            self._changed(False)
            await self._supervisor.start_child(self._make())

    def _is_idle(self) -> bool:
        if self._sleep_after is None or self._busy():
            return False
        return self._clock.monotonic() - self._used_at >= self._sleep_after

    async def _until_next_look(self) -> None:
        """Awake there is more to look at than asleep: who wakes it cuts the wait short."""
        self._woken.clear()
        try:
            async with asyncio.timeout(self._next_look()):
                await self._woken.wait()
        except TimeoutError:
            pass

    def _next_look(self) -> float:
        if self.asleep or self._sleep_after is None:
            return CHECK_EVERY
        left = self._used_at + self._sleep_after - self._clock.monotonic()
        return max(left, self._sleep_after / 10 if self._busy() else 0.01)
