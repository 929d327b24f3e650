"""The events of `Postgres.events()`: the last ones, their counts, and their listeners."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from moored.kernel import Clock, Recorder

__all__ = ["StackEvent", "StackEvents"]

#: How many events are kept.
EVENTS = 100


class StackEvent(NamedTuple):
    """An event of the connection manager: `ready`, `connection_error`, …"""

    name: str
    detail: str
    #: When it occurred, in seconds since 1970.
    wall: float = 0.0


class StackEvents:
    """Keeps the last events, counts them, and passes them to listeners and the recorder."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock
        self._listeners: set[asyncio.Queue[StackEvent | None]] = set()
        #: The last events, the oldest first.
        self.last: deque[StackEvent] = deque(maxlen=EVENTS)
        #: How often each event has occurred.
        self.counts: Counter[str] = Counter()

    def emit(self, name: str, detail: str) -> None:
        """Record an event, and pass it to every listener."""
        event = StackEvent(name, detail, self._clock.wall())
        self.last.append(event)
        self.counts[name] += 1
        for queue in self._listeners:
            queue.put_nowait(event)
        self._recorder.record("postgres", name, kind="info", cause=detail or None)

    async def listen(self) -> AsyncGenerator[StackEvent, None]:
        """Yield the events from now on, until `end`."""
        queue: asyncio.Queue[StackEvent | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.discard(queue)

    def end(self) -> None:
        """End the iteration of every listener."""
        for queue in self._listeners:
            queue.put_nowait(None)
