"""The streams of server-sent events to browsers, each with a bounded queue.

Of the *state* only the newest is of use, so a newer one replaces one that was not sent yet, and the
changes before it. *Events* are queued; when the queue of a stream is full, its oldest event
is dropped and counted, and the page gets a message with the number of lost events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from typing import NamedTuple

__all__ = ["LIVE", "BrowserStatistics", "BrowserStream", "BrowserStreams", "message"]

#: The topic of the changes of the state: a newer state has them all.
LIVE = "live"

COMMENT = b": still here\n\n"


def message(name: str, data: str, *, number: int | None = None) -> bytes:
    """Return one server-sent event; `data` is JSON, which contains no line breaks."""
    line = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{line}data: {data}\n\n".encode()


class BrowserStatistics(NamedTuple):
    """How many streams are open, and how many events and streams were dropped or refused."""

    #: Open streams.
    clients: int
    #: Events dropped because a client read too slowly, of all clients so far.
    dropped: int
    #: Streams refused because there were too many.
    refused: int


class BrowserStream:
    """One open stream, with its queue."""

    def __init__(self, size: int, topics: Collection[str]) -> None:
        self.topics = topics
        self._size = size
        self._state: bytes | None = None
        #: What is queued, each with its topic.
        self._events: deque[tuple[str, bytes]] = deque()
        self._pending = asyncio.Event()
        self._closed = False
        self._unreported = 0

    def give_state(self, state: bytes) -> None:
        """Send this state next, instead of an older one and of the changes that are queued."""
        self._events = deque(each for each in self._events if each[0] != LIVE)
        self._state = state
        self._pending.set()

    def give(self, event: bytes, topic: str) -> str | None:
        """Queue an event; return the topic of the oldest one if that was dropped to make room."""
        lost = None
        if len(self._events) >= self._size:
            lost, _ = self._events.popleft()
            self._unreported += lost != LIVE
        self._events.append((topic, event))
        self._pending.set()
        return lost

    def close(self) -> None:
        """End the stream when its queue is empty."""
        self._closed = True
        self._pending.set()

    def take(self) -> list[bytes]:
        """Empty the queue: the number of lost events, then the state, then what came after."""
        self._pending.clear()
        found = [] if self._state is None else [self._state]
        found += [event for _, event in self._events]
        if self._unreported:
            found.insert(0, message("dropped", f'{{"count":{self._unreported}}}'))
        self._events.clear()
        self._state, self._unreported = None, 0
        return found

    async def stream(self, *, heartbeat: float) -> AsyncIterator[bytes]:
        """Yield the bytes to send, and a comment after each `heartbeat` idle seconds."""
        while True:
            if waiting := self.take():
                yield b"".join(waiting)
            elif self._closed:
                return
            else:
                try:
                    async with asyncio.timeout(heartbeat):
                        await self._pending.wait()
                except TimeoutError:
                    yield COMMENT


class BrowserStreams:
    """The open streams of one service, used from one event loop.

    `limit` is the number of streams that may be open, `size` the number of events that one client
    may fall behind.
    """

    def __init__(self, *, limit: int = 100, size: int = 256) -> None:
        self._limit = limit
        self._size = size
        self._clients: set[BrowserStream] = set()
        self._dropped = 0
        self._refused = 0
        self._closed = False

    def join(self, topics: Collection[str] = ("event",)) -> BrowserStream | None:
        """Open a stream of these topics; return None if there are too many."""
        if len(self._clients) >= self._limit or self._closed:
            self._refused += 1
            return None
        client = BrowserStream(self._size, frozenset(topics))
        self._clients.add(client)
        return client

    def leave(self, client: BrowserStream) -> None:
        """Remove a stream that has ended."""
        self._clients.discard(client)

    def listening(self, topic: str) -> bool:
        """Whether a stream has this topic."""
        return any(topic in client.topics for client in self._clients)

    def publish(self, event: bytes, topic: str = "event") -> list[BrowserStream]:
        """Queue an event on every stream of a topic; return those that have lost a change by it."""
        clients = [each for each in self._clients if topic in each.topics]
        lost = [(each, each.give(event, topic)) for each in clients]
        self._dropped += sum(topic is not None for _, topic in lost)
        return [each for each, topic in lost if topic == LIVE]

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._closed = True
        for client in self._clients:
            client.close()

    def open(self) -> None:
        """Accept streams again, after a restart of the HTTP server."""
        self._closed = False

    def statistics(self) -> BrowserStatistics:
        """Return how many streams are open, and what was dropped or refused."""
        return BrowserStatistics(len(self._clients), self._dropped, self._refused)

    def __len__(self) -> int:
        return len(self._clients)
