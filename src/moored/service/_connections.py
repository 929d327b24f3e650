"""The HTTP connections of the service: how many there may be, and how long one may do nothing.

A connection is *idle* until the head of a request is complete, and again after the response. An
idle connection is closed after a while; when there are too many connections, the one that has been
idle for longest makes room for the new one, or else the oldest whose request has not arrived whole.
So clients that connect and send nothing, or half a request, keep nobody else out, and the
descriptors of the process suffice for the database.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BACKLOG", "MAX_HEAD", "ConnectionStatistics", "Connections", "protocol_of"]

log = logging.getLogger("moored.http")

#: Seconds until the head of a request is complete; a client on a slow line needs one or two.
HEAD_TIMEOUT = 10.0
#: Connections at most, and at most half of the descriptors that the process may have.
MOST = 500
#: Connections that are accepted at once, before any of them is counted.
BACKLOG = 128
#: Bytes of a request's head: what browsers send, with the cookies of other services on this host.
MAX_HEAD = 32_768
#: Seconds between two lines about connections that were closed.
QUIET = 60.0


class ConnectionStatistics(NamedTuple):
    """How many HTTP connections are idle or were closed."""

    #: Idle connections now.
    idle: int
    #: Closed because no request came in time.
    timed_out: int
    #: Closed while idle, or refused, because there were too many.
    refused: int


class Connections:
    """The open connections of one service; it lives on one event loop."""

    def __init__(self, most: int | None = None) -> None:
        self.most = _most() if most is None else most
        #: The longest idle first.
        self._idle: dict[_Connection, asyncio.TimerHandle] = {}
        #: In use, with a request whose body has not arrived whole; the oldest first.
        self._receiving: dict[_Connection, None] = {}
        self._timed_out = 0
        self._refused = 0
        self._untold = 0
        self._told = -QUIET

    def wait(self, one: _Connection) -> None:
        """Note that a connection is idle, and close it unless a request comes in time."""
        self.attend(one)
        self._idle[one] = one.loop.call_later(HEAD_TIMEOUT, self._time_out, one)

    def attend(self, one: _Connection, *, receiving: bool = False) -> None:
        """Note that a connection is in use or closed, and whether more of a request must come."""
        if (timer := self._idle.pop(one, None)) is not None:
            timer.cancel()
        if receiving:
            self._receiving[one] = None
        else:
            self._receiving.pop(one, None)

    def make_room(self, newest: _Connection) -> None:
        """Close a connection if there are too many; the newest if all others are being served."""
        if len(newest.connections) <= self.most:
            return
        self._refused += 1
        self._tell(newest.loop.time())
        others = (one for one in chain(self._idle, self._receiving) if one is not newest)
        next(others, newest).end()

    def statistics(self) -> ConnectionStatistics:
        """How many are idle, and what was closed."""
        return ConnectionStatistics(len(self._idle), self._timed_out, self._refused)

    def _time_out(self, one: _Connection) -> None:
        self._timed_out += 1
        one.end()

    def _tell(self, now: float) -> None:
        self._untold += 1
        if now - self._told >= QUIET:
            log.warning(
                "%d HTTP connections are open: %d closed to make room for new ones",
                self.most,
                self._untold,
            )
            self._told, self._untold = now, 0

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Connections: {now.idle} idle, {now.timed_out} timed out, {now.refused} refused>"


class _Connection(H11Protocol):
    """Uvicorn's, which has no limit for the head of a request and none for connections."""

    book: ClassVar[Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.book.wait(self)
        self.book.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.book.attend(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._busy:
            self.book.attend(self, receiving=self.cycle.more_body)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.book.attend(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy and not self.transport.is_closing():
            self.book.wait(self)

    def end(self) -> None:
        """Abort the connection without flushing its buffer."""
        self.book.attend(self)
        self.transport.abort()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol that uvicorn makes for each connection."""
    namespace: dict[str, Any] = {"book": connections}
    return type("Connection", (_Connection,), namespace)


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, max(16, soft // 2))
