"""The direct connection: one statement at a time, while notifications are read all the time.

psycopg opens the connection; its `notifies()` holds a lock that would delay every LISTEN, and its
statements cannot be cut off when the server does not answer. So the event loop watches the socket,
and everything that libpq has read is passed on at once. A server process whose client does not read
would fill the notification queue of the whole cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ..server import connect, has_input
from ._events import Notification

__all__ = ["SILENCE", "DirectConnection", "direct_conninfo", "open_direct"]

#: Keepalives notice a dead peer of an idle connection within 8 s, tcp_user_timeout one that does
#: not acknowledge data, and the heartbeat every other cause. LISTEN requires a primary.
_OPTIONS = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    "connect_timeout": 3,
    "target_session_attrs": "read-write",
    "client_encoding": "utf8",
}
#: After so many seconds without a byte, what was waited for is lost.
SILENCE = 3.0
#: Seconds for all addresses of a name, its resolution included.
DIAL_LIMIT = 10.0

_ERRORS = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)

#: Receives each notification, and None for other bytes of the server.
Receive = Callable[[Notification | None], None]


class DirectConnection:
    """A connection whose notifications are passed on as soon as they arrive."""

    #: The server process, according to the start of the connection.
    pid: int

    def __init__(self, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        #: Gets an exception when the connection is lost.
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._receive = receive
        self._reads = self._notifications = 0
        self._answer: asyncio.Future[bytes | None] | None = None

    async def query(self, sql: str) -> bytes | None:
        """Run a statement; return the first value of its first row; raises as `until()` does."""
        answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self._answer = answer
        self._send(sql.encode("utf-8", "surrogateescape"))
        await self.until(answer, "a statement")
        return answer.result()

    async def until(
        self, event: asyncio.Future[Any], what: str, *, notifications: bool = False
    ) -> None:
        """Wait for an event; raise if the connection is lost, or silent for `SILENCE` seconds.

        :param notifications: count only notifications as a sign of life.
        """

        def heard() -> int:
            return self._notifications if notifications else self._reads

        while not event.done():
            before = heard()
            await asyncio.wait({event, self.lost}, timeout=SILENCE, return_when="FIRST_COMPLETED")
            if self.lost.done():
                break
            # The loop may have been late itself: what waits in the socket counts.
            self._read_late()
            if not event.done() and heard() == before:
                raise TimeoutError(f"no answer to {what} within {SILENCE:g} s")
        # Also if the loss has ended the event: `_send` and `_read_late` may notice it.
        if self.lost.done():
            self.lost.result()

    def close(self) -> None:
        """Close the connection, without waiting for the server."""
        if not self.lost.done():
            self.lost.cancel()
        self._finish()

    def _send(self, sql: bytes) -> None:
        raise NotImplementedError

    def _read_late(self) -> None:
        """Take what has arrived unnoticed by the event loop."""
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _settle(self, value: bytes | Exception | None) -> None:
        """Set the outcome of the current statement."""
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        if isinstance(value, Exception):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    def _fail(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_exception(error)
            self.lost.exception()  # the listener reads it, unless it is being closed
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None


class PsycopgConnection(DirectConnection):
    """A direct connection of libpq, read by the event loop."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], receive: Receive) -> None:
        super().__init__(receive)
        self._conn = conn  # it would close the socket when it is collected
        self._pgconn = conn.pgconn
        self._socket = conn.pgconn.socket
        self._result: bytes | Exception | None = None
        self._farewell: psycopg.Error | None = None
        conn.add_notice_handler(self._noticed)
        self.pid = conn.pgconn.backend_pid
        self._loop.add_reader(self._socket, self._read)

    def _send(self, sql: bytes) -> None:
        self._result = None
        self._pgconn.send_query(sql)
        self._flush()

    def _flush(self) -> None:
        try:
            pending = self._pgconn.flush()
        except psycopg.Error as error:
            self._fail(error)
            return
        if pending:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    def _read_late(self) -> None:
        if has_input(self._socket):
            self._read()

    def _read(self) -> None:
        if self.lost.done():
            return
        error: psycopg.Error | None = None
        try:
            self._pgconn.consume_input()
        except psycopg.Error as end:
            error = self._farewell or end.with_traceback(None)
        self._reads += 1
        self._receive(None)
        # First the results: libpq parses the notifications behind a result only when it is taken.
        if self._answer is not None and error is None:
            self._take_results()
        # Notifications that came before the end of the stream are still delivered.
        while (found := self._pgconn.notifies()) is not None:
            self._notifications += 1
            self._receive(Notification(_text(found.relname), _text(found.extra), found.be_pid))
        if error is not None:
            self._stop_watching()
            self._fail(error)

    def _take_results(self) -> None:
        while not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                self._settle(self._result)
                return
            if result.status in _ERRORS:
                self._result = psycopg.errors.error_from_result(result)
            elif self._result is None and result.ntuples:
                self._result = result.get_value(0, 0)

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        """Keep the reason for which the server is about to close the connection."""
        if diagnostic.severity_nonlocalized == "FATAL" and diagnostic.sqlstate:
            self._farewell = psycopg.errors.lookup(diagnostic.sqlstate)(
                diagnostic.message_primary or ""
            )

    def _stop_watching(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)

    def _finish(self) -> None:
        self._stop_watching()
        self._conn.pgconn.finish()


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def direct_conninfo(conninfo: str, application_name: str) -> str:
    """Return the connection string of a listener; an application name in the URL wins."""
    given: dict[str, Any] = {
        "application_name": application_name,
        **conninfo_to_dict(conninfo),
        **_OPTIONS,
    }
    return make_conninfo("", **given)


async def open_direct(conninfo: str, receive: Receive) -> DirectConnection:
    """Open a direct connection."""
    async with asyncio.timeout(DIAL_LIMIT):
        return PsycopgConnection(await connect(conninfo), receive)
