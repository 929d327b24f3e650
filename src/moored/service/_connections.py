"""Limits for the HTTP connections of the service: their number, and how long one may be idle.

A connection is *idle* until the head of a request is complete, and again after the response. An
idle connection is closed after `HEAD_TIMEOUT`. If there are too many connections, the one that has
been idle for longest is closed, or else the oldest whose request is incomplete. So clients that
connect and send nothing, or half a request, cannot lock out other clients, and the process keeps
enough file descriptors for the database.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = [
    "BACKLOG",
    "MAX_HEAD",
    "ConnectionStatistics",
    "Connections",
    "max_connections",
    "protocol_of",
]

log = logging.getLogger("moored.http")

#: Seconds until the head of a request must be complete; a client on a slow line needs one or two.
HEAD_TIMEOUT = 10.0
#: The maximum of connections, and at most half of the file descriptors of the process.
MAX_CONNECTIONS = 500
#: The backlog of the listening sockets.
BACKLOG = 128
#: Bytes of a request's head; browsers also send the cookies of other services on this host.
MAX_HEAD = 32_768
#: Seconds between two log lines about connections that were closed.
WARNING_INTERVAL = 60.0


class ConnectionStatistics(NamedTuple):
    """How many HTTP connections are idle, and how many were closed."""

    #: Idle connections.
    idle: int
    #: Connections closed because no request arrived in time.
    timed_out: int
    #: Connections closed while idle, or refused, because there were too many.
    refused: int


class Connections:
    """The open connections of one service, used from one event loop."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = max_connections() if limit is None else limit
        #: The longest idle first.
        self._idle: dict[_Connection, asyncio.TimerHandle] = {}
        #: In use, with a request whose body is incomplete; the oldest first.
        self._receiving: dict[_Connection, None] = {}
        self._timed_out = 0
        self._refused = 0
        self._unreported = 0
        self._warned_at = -WARNING_INTERVAL

    def mark_idle(self, one: _Connection) -> None:
        """Mark a connection as idle, and close it unless a request arrives in time."""
        self.mark_in_use(one)
        self._idle[one] = one.loop.call_later(HEAD_TIMEOUT, self._time_out, one)

    def mark_in_use(self, one: _Connection, *, receiving: bool = False) -> None:
        """Mark a connection as in use or closed; `receiving` if its request is incomplete."""
        if (timer := self._idle.pop(one, None)) is not None:
            timer.cancel()
        if receiving:
            self._receiving[one] = None
        else:
            self._receiving.pop(one, None)

    def make_room(self, newest: _Connection) -> None:
        """Close a connection if there are too many: the newest if all others are in use."""
        if len(newest.connections) <= self.limit:
            return
        self._refused += 1
        self._warn(newest.loop.time())
        others = (one for one in chain(self._idle, self._receiving) if one is not newest)
        next(others, newest).end()

    def statistics(self) -> ConnectionStatistics:
        """Return how many connections are idle, and how many were closed."""
        return ConnectionStatistics(len(self._idle), self._timed_out, self._refused)

    def _time_out(self, one: _Connection) -> None:
        self._timed_out += 1
        one.end()

    def _warn(self, now: float) -> None:
        self._unreported += 1
        if now - self._warned_at >= WARNING_INTERVAL:
            log.warning(
                "the limit of %d HTTP connections is reached: closed %d to accept new ones",
                self.limit,
                self._unreported,
            )
            self._warned_at, self._unreported = now, 0


class _Connection(H11Protocol):
    """Uvicorn's protocol, with a timeout for the head of a request and a limit of connections."""

    tracker: ClassVar[Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.tracker.mark_idle(self)
        self.tracker.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.tracker.mark_in_use(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._busy:
            self.tracker.mark_in_use(self, receiving=self.cycle.more_body)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.tracker.mark_in_use(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._busy and not self.transport.is_closing():
            self.tracker.mark_idle(self)

    def end(self) -> None:
        """Abort the connection without flushing its buffer."""
        self.tracker.mark_in_use(self)
        self.transport.abort()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    namespace: dict[str, Any] = {"tracker": connections}
    return type("Connection", (_Connection,), namespace)


def max_connections(more: int = 0) -> int:
    """Return the limit of connections: that for pages and scrapes, and so many more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + more
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(16, soft // 2))
