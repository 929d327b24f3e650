"""A source in memory, for tests and for programs with one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ._events import SourceEvent, SourceGap

__all__ = ["MemorySource"]


class MemorySource:
    """An `EventSource` for events of this process."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[SourceEvent | SourceGap] = asyncio.Queue()

    def publish(self, channel: str, payload: str, *, tenant: str | None = None) -> None:
        """Hand an event to the broker; from the broker's event loop."""
        self._queue.put_nowait(SourceEvent(channel, payload, tenant))

    def gap(self, reason: str) -> None:
        """Report that events may be missing."""
        self._queue.put_nowait(SourceGap(reason))

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        """Yield the events as they are published."""
        yield SourceGap("the source has begun")
        while True:
            yield await self._queue.get()
