"""Reading the history for many streams: each page once, one at a time, each tenant in its turn.

A deploy makes all clients resume at once. Their reads wait here, and not in the source's pool of
connections, where live events would wait behind them.

A stream may wait only for a read that begins afterwards: one that has begun may not see an event
that the broker handed out before the stream was registered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from moored.kernel import Tasks

from ._events import LiveEvent, ReplaySource, SourceEvent

__all__ = ["Page", "Replays"]

#: How many events of the history are read at a time.
PAGE = 100
#: Reads at a time, of all tenants: a source has at least one more connection for live events.
READS = 1
#: After a read, no other takes its place for twice the time that it took, and at most for so many
#: seconds: live events need the event loop and the database, too, and streams that wait share more
#: reads.
REST = 0.1


class Page(NamedTuple):
    """Events of the history, and the position of the last one; None at the end of the history."""

    events: list[LiveEvent]
    last: Any


class _Read:
    """One read, and how many streams wait for it."""

    __slots__ = ("after", "channels", "done", "task", "tenant", "waiting")

    def __init__(self, after: Any, tenant: str, channels: frozenset[str] | None) -> None:
        self.after, self.tenant, self.channels = after, tenant, channels
        self.done: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.waiting = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.tenant, self.channels, self.after


class Replays:
    """Shares the reads of a history among streams.

    :param admit: returns the event as subscribers get it, or None for one that they must not get.
    """

    def __init__(
        self, source: ReplaySource, admit: Callable[[SourceEvent], LiveEvent | None]
    ) -> None:
        self._source = source
        self._admit = admit
        self._running = 0
        #: The reads that have not begun, by what they read.
        self._queued: dict[tuple[Any, ...], _Read] = {}
        #: The same by tenant; the tenant whose turn it is comes first.
        self._turns: dict[str, deque[_Read]] = {}
        self._tasks = Tasks()

    async def page(self, after: Any, tenant: str, channels: frozenset[str] | None) -> Page:
        """Return the events after a position that can be read now."""
        read = self._queued.get((tenant, channels, after))
        if read is None:
            read = _Read(after, tenant, channels)
            self._queued[read.key] = read
            self._turns.setdefault(tenant, deque()).append(read)
            self._begin()
        read.waiting += 1
        try:
            return await asyncio.shield(read.done)
        finally:
            read.waiting -= 1
            if not read.waiting:
                self._abandon(read)

    def _begin(self) -> None:
        while self._turns and self._running < READS:
            tenant, reads = next(iter(self._turns.items()))
            del self._turns[tenant]
            read = reads.popleft()
            if reads:
                self._turns[tenant] = reads  # after all others
            del self._queued[read.key]
            self._running += 1
            read.task = self._tasks.start(self._run(read), name=f"history of {tenant}")
            # Not within the task: one that is cancelled before its first step never runs.
            loop = asyncio.get_running_loop()
            read.task.add_done_callback(partial(self._ended, read, loop, loop.time()))

    async def _run(self, read: _Read) -> None:
        try:
            found = await self._source.read(read.after, read.tenant, read.channels, PAGE)
            events = [event for event in map(self._admit, found) if event is not None]
            page = Page(events, found[-1].position if found else None)
            if not read.done.done():
                read.done.set_result(page)
        except Exception as error:
            if not read.done.done():
                read.done.set_exception(error)

    def _ended(
        self,
        read: _Read,
        loop: asyncio.AbstractEventLoop,
        began: float,
        task: asyncio.Task[None],
    ) -> None:
        read.done.cancel()
        if task.cancelled():
            self._free()
        else:
            loop.call_later(min(2 * (loop.time() - began), REST), self._free)

    def _free(self) -> None:
        self._running -= 1
        self._begin()

    def _abandon(self, read: _Read) -> None:
        """Forget a read for which no stream waits any more."""
        if read.done.done():
            return
        read.done.cancel()
        if read.task is not None:
            read.task.cancel()
        elif self._queued.pop(read.key, None) is read:
            self._turns[read.tenant].remove(read)
            if not self._turns[read.tenant]:
                del self._turns[read.tenant]
