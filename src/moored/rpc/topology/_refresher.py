"""Call a function regularly, and sooner when a caller triggers it, under a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from moored.kernel import (
    Child,
    Clock,
    Context,
    Recorder,
    RestartRequested,
    Supervisor,
    describe,
    start_task,
)

__all__ = ["Refresher"]

EVERY = 300.0
#: The random part of the interval, so that the clients of a fleet do not fetch at the same time.
JITTER = 0.1


class Refresher:
    """Calls a function regularly on the running loop, until it is stopped.

    - A function that fails is recorded and counted as a restart; the next call is made as usual.
    - Triggers that come before the next refresh count as one.
    - `trigger` and `stop` may be called from any thread.

    :param refresh: the function.
    :param every: seconds between two refreshes without a trigger.
    :param pause: seconds from the beginning of a refresh to a refresh that is triggered.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[object]],
        *,
        every: float = EVERY,
        pause: float = 1.0,
        name: str = "rpc.topology",
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._refresh = refresh
        self._every = every
        self._pause = pause
        self._clock = clock or Clock.current()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._began_at = float("-inf")
        #: Runs the function.
        self.supervisor = Supervisor(
            name,
            children=[Child("refresh", self._run)],
            intensity=None,  # a topology service may be down for days
            recorder=recorder,
            clock=clock,
        )
        #: The task of the supervisor.
        self.task = start_task(self._supervise(), name=name)

    def trigger(self) -> None:
        """Refresh soon."""
        self._post(self._wake.set)

    def stop(self) -> None:
        """Cancel the task, and a refresh in progress; return at once."""
        self._post(self.task.cancel)

    def _post(self, act: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the task has ended
            self._loop.call_soon_threadsafe(act)

    async def _supervise(self) -> None:
        async with self.supervisor:
            await self.supervisor.wait()

    async def _run(self, ctx: Context) -> None:
        ctx.started()
        while True:
            triggered = await self._wait()
            if triggered and (rest := self._began_at + self._pause - self._clock.monotonic()) > 0:
                await asyncio.sleep(rest)
            self._wake.clear()
            self._began_at = self._clock.monotonic()
            try:
                await self._refresh()
            except Exception as error:
                raise RestartRequested(f"the refresh failed: {describe(error)}") from error

    async def _wait(self) -> bool:
        """Wait for the next refresh; return whether it was triggered."""
        chance = JITTER * (2 * self._clock.random.random() - 1)
        try:
            async with asyncio.timeout(self._every * (1 + chance)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True
