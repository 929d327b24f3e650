"""Connections to Postgres: runs statements with a timeout, and translates errors.

A call that times out or is cancelled closes its connection at the socket. A cancel request would
need an answer of the server, which is what is missing; and a connection with an unread response
cannot be used again.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.pq import TransactionStatus

from moored.kernel import (
    Clock,
    Deadline,
    cut_socket,
    forget_frames,
    uncancelled,
)

from .._errors import StoreUnavailable
from ._config import PostgresConfig
from ._errors import is_stale_primary, translate

__all__ = ["PostgresLink", "Row"]

Row = tuple[Any, ...]
Connection = AsyncConnection[Row]

#: The statement timeout, as a share of the remaining time: the server's error says more than ours.
_SERVER_SHARE = 0.9


class PostgresLink:
    """Runs statements on a server.

    The timeout of a call includes the wait for a free connection, connecting, and the response."""

    def __init__(self, config: PostgresConfig, *, clock: Clock) -> None:
        self.config = config
        self._clock = clock
        self._slots = asyncio.Semaphore(config.connections)
        self._idle: list[Connection] = []
        self._closed = False

    async def run(
        self, statements: bytes, parameters: Mapping[str, Any] | None = None
    ) -> list[Row]:
        """Send one message, and return the rows of its last statement."""
        deadline = Deadline.after(self.config.timeout, self._clock)
        try:
            async with asyncio.timeout(self.config.timeout), self._slots:
                return await self._run(statements, dict(parameters or {}), deadline)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"Postgres at {self.config.place} did not answer within {self.config.timeout:g} s"
            ) from error
        except (psycopg.Error, OSError) as error:
            raise translate(error, self.config.place) from error

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        await self._close_idle()

    async def _run(
        self, statements: bytes, parameters: dict[str, Any], deadline: Deadline
    ) -> list[Row]:
        connection = await self._connection()
        parameters["timeout_ms"] = str(max(1, int(deadline.remaining() * _SERVER_SHARE * 1000)))
        try:
            return await uncancelled(
                _rows(connection, statements, parameters), lambda: _cut(connection)
            )
        except psycopg.Error as error:
            if is_stale_primary(error):
                # The host name may resolve to the new primary now, for new connections.
                await connection.close()
                await self._close_idle()
            raise
        finally:
            await self._put_back(connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            await connection.close()
        try:
            return await AsyncConnection.connect(
                self.config.conninfo,
                autocommit=True,
                prepare_threshold=None,
                cursor_factory=AsyncClientCursor,
            )
        except asyncio.CancelledError as given_up:
            forget_frames(given_up)
            raise

    async def _put_back(self, connection: Connection) -> None:
        usable = not connection.closed and (
            connection.info.transaction_status == TransactionStatus.IDLE
        )
        if usable and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()


async def _rows(
    connection: Connection, statements: bytes, parameters: Mapping[str, Any]
) -> list[Row]:
    async with connection.cursor() as cursor:
        await cursor.execute(statements, parameters)
        while cursor.nextset():
            pass
        return await cursor.fetchall() if cursor.description else []


def _cut(connection: Connection) -> None:
    """End the connection by its socket; the driver then finds it closed."""
    with suppress(psycopg.Error):
        cut_socket(connection.fileno())


def _is_quiet(connection: Connection) -> bool:
    """Whether the server has sent nothing since the last response: no error, no end of file."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
