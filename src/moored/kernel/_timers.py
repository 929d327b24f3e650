"""Timers that are set, replaced and cancelled by name, and that never fire early.

An event loop may fire a timer a little before its deadline: uvloop rounds delays to milliseconds,
and its `time()` may be behind the clock by which the deadline was chosen. Code that is woken too
early, finds nothing due and waits for its next timer would wait for ever. These timers check the
clock when they fire, and wait for the remaining time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from ._clock import Clock
from ._words import counted

__all__ = ["Timers", "sleep_until"]


async def sleep_until(at: float, clock: Clock | None = None) -> None:
    """Sleep until the clock's monotonic time is at least `at`; always yield to the loop once."""
    monotonic = (clock or Clock.current()).monotonic
    await asyncio.sleep(at - monotonic())
    while (left := at - monotonic()) > 0:  # noqa: ASYNC110 (time is what it waits for)
        await asyncio.sleep(left)


class Timers:
    """Named timers on the running event loop.

    - At most one timer per name: setting a name again replaces its timer.
    - When a callback runs, the clock has reached its deadline and the name is free again, so the
      callback may set it.
    - A replaced or cancelled timer never fires, even if it is due in this iteration of the loop.

    Deadlines are in `clock.monotonic()` seconds; the default clock is that of the running loop. A
    `Timers` object belongs to one loop. An exception of a callback goes to the loop's exception
    handler.
    """

    __slots__ = ("_armed", "_clock")

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._armed: dict[Hashable, tuple[float, asyncio.TimerHandle]] = {}

    def set(self, name: Hashable, at: float, callback: Callable[[], object]) -> None:
        """Call the callback at this time, or in the next iteration of the loop if it has passed."""
        self.cancel(name)
        self._arm(name, at, callback)

    def cancel(self, name: Hashable) -> None:
        """Cancel a timer; harmless if none is set under this name."""
        if (armed := self._armed.pop(name, None)) is not None:
            armed[1].cancel()

    def cancel_all(self) -> None:
        """Cancel every timer."""
        for name in list(self._armed):
            self.cancel(name)

    def at(self, name: Hashable) -> float | None:
        """Return when a timer is due, or None if none is set under this name."""
        armed = self._armed.get(name)
        return None if armed is None else armed[0]

    def __contains__(self, name: Hashable) -> bool:
        return name in self._armed

    def __len__(self) -> int:
        return len(self._armed)

    def __repr__(self) -> str:
        names = ", ".join(map(str, self._armed))
        return f"<Timers: {counted(len(self._armed), 'timer')} set{names and ': '}{names}>"

    def _arm(self, name: Hashable, at: float, callback: Callable[[], object]) -> None:
        delay = max(0.0, at - self._now())
        timer = asyncio.get_running_loop().call_later(delay, self._fire, name, at, callback)
        self._armed[name] = (at, timer)

    def _fire(self, name: Hashable, at: float, callback: Callable[[], object]) -> None:
        if self._now() < at:
            self._arm(name, at, callback)
        else:
            del self._armed[name]
            callback()

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()
