"""Call a function regularly, and sooner when a caller triggers it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from moored.kernel import Clock, Recorder, first_of

__all__ = ["Refresher"]

EVERY = 300.0
#: The random part of the interval, so that the clients of a fleet do not fetch at the same time.
JITTER = 0.1


class Refresher:
    """Calls a function regularly, until it is stopped.

    - An exception of the function is recorded, and the next call is made as usual.
    - Triggers that come before the next refresh count as one.
    - `trigger` and `stop` may be called from any thread, before, during and after `run`.

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
        self.name = name
        self._refresh = refresh
        self._every = every
        self._pause = pause
        self._clock = clock
        self._recorder = recorder
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set by any thread, and copied into the events by the loop.
        self._wanted = self._stopped = False
        self._wake, self._end = asyncio.Event(), asyncio.Event()
        #: The number of refreshes, and of failed ones.
        self.refreshes = 0
        self.failures = 0

    async def run(self) -> None:
        """Refresh until `stop` is called, or this task is cancelled."""
        if self._loop is not None:
            raise RuntimeError(f"{self.name} runs already")
        self._loop = asyncio.get_running_loop()
        # From here on other threads notify the loop; what they wanted before is read now.
        self._notice()
        if not self._stopped:
            await first_of(self._end.wait(), self._rounds())

    def trigger(self) -> None:
        """Refresh soon."""
        self._wanted = True
        self._notify()

    def stop(self) -> None:
        """End `run`, and cancel a refresh in progress; return at once."""
        self._stopped = True
        self._notify()

    def _notify(self) -> None:
        # A forked child inherits the object, but not the loop.
        if (loop := self._loop) is not None and os.getpid() == self._pid:
            with suppress(RuntimeError):  # the loop is closed: `run` has ended
                loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        if self._stopped:
            self._end.set()
        elif self._wanted:
            self._wake.set()

    async def _rounds(self) -> None:
        clock = self._clock or Clock.current()
        began_at = float("-inf")
        while True:
            triggered = await self._wait(clock)
            if triggered and (rest := began_at + self._pause - clock.monotonic()) > 0:
                await asyncio.sleep(rest)
            self._wanted = False
            self._wake.clear()
            began_at = clock.monotonic()
            await self._round()

    async def _wait(self, clock: Clock) -> bool:
        """Wait for the next round; return whether it was triggered."""
        chance = JITTER * (2 * clock.random.random() - 1)
        try:
            async with asyncio.timeout(self._every * (1 + chance)):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _round(self) -> None:
        self.refreshes += 1
        try:
            await self._refresh()
        except Exception as error:
            self.failures += 1
            if self._recorder is not None:
                self._recorder.record(self.name, "refresh failed", kind="failure", cause=error)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "running" if self._loop else "not started"
        return (
            f"<Refresher {self.name}: {state}, every {self._every:g} s, "
            f"{self.refreshes} refreshes, {self.failures} failed>"
        )
