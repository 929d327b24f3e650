"""The driver for asyncpg."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

from ._driver import Driver, DriverState

__all__ = ["AsyncpgDriver"]

RESET_TIMEOUT = 5.0


class AsyncpgDriver(Driver):
    """The driver for asyncpg, which has no implicit transactions: there is nothing to commit."""

    name: ClassVar[str] = "asyncpg"
    kind: ClassVar[Literal["asyncio"]] = "asyncio"
    closes_at_once: ClassVar[bool] = True

    def clean(self, conn: Any) -> bool:
        """Whether the connection works and is idle, outside of a transaction."""
        return not (conn.is_closed() or conn.is_in_transaction() or self._busy(conn))

    def state(self, conn: Any) -> DriverState:
        """The state of the connection."""
        if conn.is_closed():
            return DriverState.BROKEN
        if self._busy(conn):
            return DriverState.BUSY
        return DriverState.TRANSACTION if conn.is_in_transaction() else DriverState.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether the connection was closed, even if the loop has not read that yet."""
        return bool(conn.is_closed()) or _hung_up(conn._transport)

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: the state of the connection shows whether a statement is running."""
        return False

    async def rollback(self, conn: Any, timeout: float) -> None:
        """Roll back a transaction that was left open."""
        if conn.is_in_transaction():
            await self._in_time(conn, conn.execute("ROLLBACK"), timeout)

    async def interrupt(self, conn: Any, timeout: float) -> None:
        """Wait for the end of a cancelled query; asyncpg has sent the cancel request."""
        await self._in_time(conn, conn._protocol._wait_for_cancellation(), timeout)

    async def _in_time(self, conn: Any, answer: Awaitable[object], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await answer
        except TimeoutError:
            self.close(conn)
            raise

    async def ping(self, conn: Any, timeout: float) -> None:
        """Query the server."""
        # asyncpg fails on the answer to the empty query, which would be shorter.
        await conn.execute("SELECT 1", timeout=timeout)

    def resetter(self) -> Callable[[Any], Any]:
        """Return a function that resets settings, LISTEN, cursors and locks, as asyncpg's pool."""
        return self._reset

    async def _reset(self, conn: Any) -> None:
        await self._in_time(conn, conn.reset(), RESET_TIMEOUT)

    def close(self, conn: Any) -> None:
        """Abort the connection: a graceful close could wait for a server that has vanished."""
        if not conn.is_closed():
            conn.terminate()

    @staticmethod
    def _busy(conn: Any) -> bool:
        """Whether a query that was cancelled is still being cancelled on the server."""
        return bool(conn._protocol._is_cancelling())


#: First bytes that end a stream: end of file, an error of the server, a TLS alert.
_ENDINGS = (b"", b"E", b"\x15")


def _hung_up(transport: Any) -> bool:
    """Whether the end of the stream is waiting to be read from the socket."""
    known = transport.get_extra_info("socket")
    if known is None:
        return False
    if known.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(known.fileno(), select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        with socket.socket(fileno=os.dup(known.fileno())) as line:
            return line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) in _ENDINGS
    except BlockingIOError:
        return False
    except OSError:
        return True
