"""The streams of server-sent events to browsers, each with a bounded queue.

Two kinds of messages are sent. Of the *state* only the newest is of use, so a newer one replaces
one that was not sent yet. *Events* are queued; when the queue of a stream is full, its oldest event
is dropped and counted, and the page gets a message with the number of lost events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

__all__ = ["BrowserStatistics", "BrowserStream", "BrowserStreams", "message"]

COMMENT = b": still here\n\n"


def message(name: str, data: str, *, number: int | None = None) -> bytes:
    """One server-sent event; `data` is JSON and so has no line breaks of its own."""
    line = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{line}data: {data}\n\n".encode()


class BrowserStatistics(NamedTuple):
    """Open streams, and what was dropped or refused."""

    #: Streams that are open now.
    clients: int
    #: Events that were dropped because a client read too slowly, over all clients so far.
    dropped: int
    #: Streams that were refused because there were too many.
    refused: int


class BrowserStream:
    """One open stream, with its queue."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._state: bytes | None = None
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._untold = 0
        #: Events that this client lost so far.
        self.dropped = 0

    def give_state(self, state: bytes) -> None:
        """Send this state next, instead of an older one."""
        self._state = state
        self._news.set()

    def give(self, event: bytes) -> None:
        """Queue an event; when the queue is full, drop and count the oldest one."""
        if len(self._events) >= self._size:
            self._events.popleft()
            self._untold += 1
            self.dropped += 1
        self._events.append(event)
        self._news.set()

    def close(self) -> None:
        """End the stream when its queue is empty."""
        self._closed = True
        self._news.set()

    def take(self) -> list[bytes]:
        """Empty the queue: lost events first, then events, then the state."""
        self._news.clear()
        found = list(self._events)
        self._events.clear()
        if self._untold:
            found.insert(0, message("dropped", f'{{"count":{self._untold}}}'))
            self._untold = 0
        if self._state is not None:
            found.append(self._state)
            self._state = None
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
                        await self._news.wait()
                except TimeoutError:
                    yield COMMENT


class BrowserStreams:
    """The open streams. It lives on one event loop.

    `limit` bounds what a forgotten browser tab, times many, can cost. `size` is how many
    events one client may fall behind.
    """

    def __init__(self, *, limit: int = 100, size: int = 256) -> None:
        self._limit = limit
        self._size = size
        self._clients: set[BrowserStream] = set()
        self._dropped = 0
        self._refused = 0
        self._closed = False

    def join(self) -> BrowserStream | None:
        """Open a stream; return None when there are too many."""
        if len(self._clients) >= self._limit or self._closed:
            self._refused += 1
            return None
        client = BrowserStream(self._size)
        self._clients.add(client)
        return client

    def leave(self, client: BrowserStream) -> None:
        """Remove a stream that has ended."""
        if client in self._clients:
            self._clients.discard(client)
            self._dropped += client.dropped

    def publish(self, event: bytes) -> None:
        """Queue an event on every stream."""
        for client in self._clients:
            client.give(event)

    def publish_state(self, state: bytes) -> None:
        """Set the newest state on every stream."""
        for client in self._clients:
            client.give_state(state)

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._closed = True
        for client in self._clients:
            client.close()

    def open(self) -> None:
        """Accept streams again, after a restart of the HTTP server."""
        self._closed = False

    def statistics(self) -> BrowserStatistics:
        """How many streams there are, and what was lost."""
        dropped = self._dropped + sum(client.dropped for client in self._clients)
        return BrowserStatistics(len(self._clients), dropped, self._refused)

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        now = self.statistics()
        open_now = f"{now.clients} of {self._limit} streams"
        return f"<BrowserStreams: {open_now}, {now.dropped} events dropped>"
