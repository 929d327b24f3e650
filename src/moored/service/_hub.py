"""From one stream of news to many browsers: bounded for each, so that a slow one slows nobody.

Two kinds of news go out. The *state* is only ever wanted in its newest form, so a newer one takes
the place of one that was not yet sent. *Events* are queued; when a client's queue is full its
oldest event goes, is counted, and the client is told how many it lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

__all__ = ["Client", "Hub", "HubStatistics", "message"]

COMMENT = b": still here\n\n"


def message(name: str, data: str, *, number: int | None = None) -> bytes:
    """One server-sent event; `data` is JSON and so has no line breaks of its own."""
    line = "" if number is None else f"id: {number}\n"
    return f"event: {name}\n{line}data: {data}\n\n".encode()


class HubStatistics(NamedTuple):
    """What the hub has done."""

    #: Streams that are open now.
    clients: int
    #: Events that were dropped because a client read too slowly, over all clients so far.
    dropped: int
    #: Streams that were refused because there were too many.
    refused: int


class Client:
    """One open stream and what waits to be sent on it."""

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
        """Queue an event; when there is no room, the oldest goes, and is counted."""
        if len(self._events) >= self._size:
            self._events.popleft()
            self._untold += 1
            self.dropped += 1
        self._events.append(event)
        self._news.set()

    def close(self) -> None:
        """End the stream once what waits has been sent."""
        self._closed = True
        self._news.set()

    def take(self) -> list[bytes]:
        """Everything that waits, in the order in which a page should hear it."""
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
        """What to send, with a comment in quiet times, so that proxies and both ends stay awake."""
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


class Hub:
    """The open streams. It lives on one event loop.

    `max_clients` bounds what a forgotten browser tab, times many, can cost. `size` is how many
    events one client may fall behind.
    """

    def __init__(self, *, max_clients: int = 100, size: int = 256) -> None:
        self._max_clients = max_clients
        self._size = size
        self._clients: set[Client] = set()
        self._dropped = 0
        self._refused = 0
        self._closed = False

    def join(self) -> Client | None:
        """A new stream, or None when there are too many already."""
        if len(self._clients) >= self._max_clients or self._closed:
            self._refused += 1
            return None
        client = Client(self._size)
        self._clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        """Forget a stream that has ended."""
        if client in self._clients:
            self._clients.discard(client)
            self._dropped += client.dropped

    def publish(self, event: bytes) -> None:
        """Give every stream an event."""
        for client in self._clients:
            client.give(event)

    def publish_state(self, state: bytes) -> None:
        """Give every stream the newest state."""
        for client in self._clients:
            client.give_state(state)

    def close(self) -> None:
        """End every stream, so that a stop need not wait for browsers."""
        self._closed = True
        for client in self._clients:
            client.close()

    def open(self) -> None:
        """Take streams again, after a restart of the HTTP part."""
        self._closed = False

    def statistics(self) -> HubStatistics:
        """How many streams there are, and what was lost."""
        dropped = self._dropped + sum(client.dropped for client in self._clients)
        return HubStatistics(len(self._clients), dropped, self._refused)

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Hub: {now.clients} of {self._max_clients} streams, {now.dropped} events dropped>"
