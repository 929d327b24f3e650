"""The last events, in memory: the history of sources that have none of their own."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import Any

from ._events import HistoryLost, LiveEvent
from ._replays import PAGE, Page

__all__ = ["RecentEvents"]


class RecentEvents:
    """The last events of this process; it is read at once, where `Replays` would queue a read.

    An id is valid in this process only: it begins with a random name of the process.

    :param events: the number of events that are kept.
    :param size: the bytes of payload that are kept.
    """

    def __init__(self, events: int, size: int) -> None:
        self._limits = events, size
        self._kept: deque[LiveEvent] = deque()
        self._bytes = 0
        self._last = 0
        # The position before the oldest event that is kept.
        self._before = 0
        self._process = secrets.token_hex(4)

    def add(self, channel: str, payload: str, tenant: str, user: str = "") -> LiveEvent:
        """Number an event, and keep it in place of the oldest ones."""
        self._last += 1
        id = f"{self._process}-{self._last}"
        event = LiveEvent(channel, payload, tenant, id, self._last, user)
        self._kept.append(event)
        self._bytes += event.size
        events, size = self._limits
        while len(self._kept) > events or (self._bytes > size and len(self._kept) > 1):
            self._forget()
        return event

    def cut(self) -> str:
        """Forget all events, because some after them are missing; return the id to resume after."""
        while self._kept:
            self._forget()
        self._last += 1  # an id from before is not valid any more
        self._before = self._last
        return f"{self._process}-{self._last}"

    def _forget(self) -> None:
        oldest = self._kept.popleft()
        self._bytes -= oldest.size
        self._before = oldest.position

    def position(self, id: str) -> Any:
        """Return the number of an event."""
        process, _, number = id.partition("-")
        if process != self._process or int(number) > self._last:
            raise HistoryLost("the event id is not one of this process")
        return int(number)

    def page(
        self, after: Any, tenant: str, channels: frozenset[str] | None
    ) -> asyncio.Future[Page]:
        """Return a future of the tenant's events after a position, which is done."""
        done: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        if after < self._before:
            done.set_exception(HistoryLost("the history does not reach back to the event id"))
            done.exception()  # retrieved, also if the stream is closed now
            return done
        found = [
            event
            for event in self._kept
            if event.position > after
            and event.tenant == tenant
            and (channels is None or event.channel in channels)
        ][:PAGE]
        done.set_result(Page(found, found[-1].position if found else None))
        return done
