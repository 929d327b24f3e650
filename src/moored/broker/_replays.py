"""Reading the history for many streams: each page once, few at a time, each tenant in its turn.

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

from moored.kernel import Backoff, Tasks

from ._events import DEFECTS, HistoryLost, LiveEvent, ReplaySource, SourceEvent

__all__ = ["Page", "Replays"]

#: How many events of the history are read at a time.
PAGE = 100
#: Reads at a time, of all tenants: a source has at least two more connections for live events.
READS = 2
#: After a read, no other takes its place for twice the time that it took, and at most for so many
#: seconds: live events need the event loop and the database, too, and streams that wait share more
#: reads.
REST = 0.1
#: Seconds after which a read is cancelled, so that the others get their turn. It is queued again,
#: with twice the time.
LIMIT = 2.0
#: Seconds between two attempts to read the history from a server that is down.
RETRY = 0.5, 5.0


class Page(NamedTuple):
    """Events of the history, and the position of the last one; None at the end of the history."""

    events: list[LiveEvent]
    last: Any


class _Read:
    """One read, and the streams that wait for it."""

    __slots__ = ("after", "channels", "limit", "retry", "task", "tenant", "waiters")

    def __init__(self, after: Any, tenant: str, channels: frozenset[str] | None) -> None:
        self.after, self.tenant, self.channels = after, tenant, channels
        self.waiters: dict[asyncio.Future[Page], None] = {}
        self.task: asyncio.Task[float | None] | None = None
        self.limit = LIMIT
        self.retry = Backoff(*RETRY, jitter="half")

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
        self._closed = False

    def position(self, id: str) -> Any:
        """Return the position of an id; raise `HistoryLost` or `ValueError` if it is not known."""
        return self._source.position(id)

    def page(
        self, after: Any, tenant: str, channels: frozenset[str] | None
    ) -> asyncio.Future[Page]:
        """Return a future of the events after a position; who does not need it any more cancels it.

        It fails with `HistoryLost`, or with a defect; a read that fails otherwise is repeated.
        """
        read = self._queued.get((tenant, channels, after))
        if read is None:
            read = _Read(after, tenant, channels)
        waiter: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(partial(self._left, read))
        read.waiters[waiter] = None
        if read.key not in self._queued:
            self._queue(read)
        return waiter

    async def close(self) -> None:
        """Cancel the reads, and wait until they have ended."""
        self._closed = True
        await self._tasks.cancel()

    def _queue(self, read: _Read) -> None:
        self._queued.setdefault(read.key, read)
        self._turns.setdefault(read.tenant, deque()).append(read)
        self._begin()

    def _begin(self) -> None:
        while self._turns and self._running < READS and not self._closed:
            tenant, reads = next(iter(self._turns.items()))
            del self._turns[tenant]
            read = reads.popleft()
            if reads:
                self._turns[tenant] = reads  # after all others
            if self._queued.get(read.key) is read:
                del self._queued[read.key]
            if not read.waiters:
                continue
            self._running += 1
            read.task = self._tasks.start(self._run(read), name=f"history of {tenant}")
            # Not within the task: one that is cancelled before its first step never runs.
            loop = asyncio.get_running_loop()
            read.task.add_done_callback(partial(self._ended, read, loop, loop.time()))

    async def _run(self, read: _Read) -> float | None:
        """Read a page for the streams that wait; return the seconds until the next attempt."""
        limit = asyncio.timeout(read.limit)
        try:
            async with limit:
                found = await self._source.read(read.after, read.tenant, read.channels, PAGE)
            events = [event for event in map(self._admit, found) if event is not None]
            page = Page(events, found[-1].position if found else None)
        except (HistoryLost, *DEFECTS) as error:
            for waiter in read.waiters:
                if not waiter.done():
                    waiter.set_exception(error)
                    waiter.exception()  # retrieved, also if the stream is closed now
        except Exception:
            if not limit.expired():
                return read.retry.fail()  # the server is down: the broker logs that
            read.limit *= 2
            return 0.0
        else:
            for waiter in read.waiters:
                if not waiter.done():
                    waiter.set_result(page)
        return None

    def _ended(
        self,
        read: _Read,
        loop: asyncio.AbstractEventLoop,
        began: float,
        task: asyncio.Task[float | None],
    ) -> None:
        read.task = None
        if task.cancelled():
            self._free()
            return
        loop.call_later(min(2 * (loop.time() - began), REST), self._free)
        if (again := task.result()) is not None:
            loop.call_later(again, self._queue, read)

    def _free(self) -> None:
        self._running -= 1
        self._begin()

    def _left(self, read: _Read, waiter: asyncio.Future[Page]) -> None:
        """Cancel a read for which no stream waits any more."""
        del read.waiters[waiter]
        if not read.waiters and read.task is not None:
            read.task.cancel()
