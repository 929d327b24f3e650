"""asyncpg: connections that notice by themselves when the server hangs up."""

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
    """asyncpg's connections. It has no implicit transactions, so there is nothing to commit."""

    name: ClassVar[str] = "asyncpg"
    kind: ClassVar[Literal["asyncio"]] = "asyncio"
    closes_at_once: ClassVar[bool] = True

    def clean(self, conn: Any) -> bool:
        """Whether it works and nothing is under way."""
        return not (conn.is_closed() or conn.is_in_transaction() or self._busy(conn))

    def state(self, conn: Any) -> DriverState:
        """What it is in the middle of."""
        if conn.is_closed():
            return DriverState.BROKEN
        if self._busy(conn):
            return DriverState.BUSY
        return DriverState.TRANSACTION if conn.is_in_transaction() else DriverState.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether it was closed, by us or by the server, also if the loop has not read that yet."""
        return bool(conn.is_closed()) or _hung_up(conn._transport)

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: a connection knows whether it is in the middle of something."""
        return False

    async def rollback(self, conn: Any, timeout: float) -> None:
        """Undo the transaction that somebody left open."""
        if conn.is_in_transaction():
            await self._in_time(conn, conn.execute("ROLLBACK"), timeout)

    async def interrupt(self, conn: Any, timeout: float) -> None:
        """Wait for the end of a cancelled query, for which asyncpg has sent the request."""
        await self._in_time(conn, conn._protocol._wait_for_cancellation(), timeout)

    async def _in_time(self, conn: Any, answer: Awaitable[object], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await answer
        except TimeoutError:
            self.close(conn)
            raise

    async def ping(self, conn: Any, timeout: float) -> None:
        """Ask for a sign of life."""
        # The empty query would be shorter, but asyncpg trips over its answer.
        await conn.execute("SELECT 1", timeout=timeout)

    def resetter(self) -> Callable[[Any], Any]:
        """What asyncpg's own pool does: settings, LISTEN, cursors and advisory locks are undone."""
        return self._reset

    async def _reset(self, conn: Any) -> None:
        await self._in_time(conn, conn.reset(), RESET_TIMEOUT)

    def close(self, conn: Any) -> None:
        """Close it at once: a farewell could wait for a server that has vanished."""
        if not conn.is_closed():
            conn.terminate()

    @staticmethod
    def _busy(conn: Any) -> bool:
        """Whether a query that was cancelled is still being cancelled on the server."""
        return bool(conn._protocol._is_cancelling())


#: What ends a stream: nothing more, the server's error, or an alert of TLS.
_ENDINGS = (b"", b"E", b"\x15")


def _hung_up(transport: Any) -> bool:
    """Whether the end of the stream waits to be read: an idle server says nothing else."""
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
