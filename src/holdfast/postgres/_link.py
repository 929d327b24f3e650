"""One direct connection for replication: commands first, then the stream.

psycopg has no words for the stream, so this talks to libpq, which has. Reading is done in batches:
a reader that wakes up for every message keeps the sender from filling its packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Any

import psycopg

from ._errors import StreamEnded

__all__ = ["KEEPALIVES", "Link"]

#: How the system finds out, within 10 s, that the other side has vanished without a word.
KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": 3,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 9000,
}

#: How long to let data gather when it comes without a pause.
NAP = 0.0005
#: How many messages are handed on at a time, so that nothing else waits for long.
BATCH = 2000


class Link:
    """A connection that speaks the replication protocol."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._loop = asyncio.get_running_loop()
        self._flooded = False
        self._warning: str | None = None

    @classmethod
    async def dial(cls, conninfo: str, *, timeout: float = 30.0, **options: Any) -> Link:
        """Open one."""
        async with asyncio.timeout(timeout):
            connection = await psycopg.AsyncConnection.connect(
                conninfo, autocommit=True, replication="database", **options
            )
        return cls(connection)

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._connection.closed

    @property
    def has_input(self) -> bool:
        """Whether something has come that was not read yet."""
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    async def command(self, text: str, *, timeout: float | None = None) -> Sequence[Sequence[Any]]:
        """Send one command and wait for its rows.

        When this is cancelled, or takes longer than it may, the connection is cut: the driver would
        ask the server, which may not answer any more, to cancel the command.
        """
        work = asyncio.ensure_future(self._execute(text))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(work)
        except TimeoutError:
            await self._abandon(work)
            raise StreamEnded(
                f"the server has not answered for {timeout:.0f} s: {text[:80]}"
            ) from None
        except asyncio.CancelledError:
            await self._abandon(work)
            raise

    async def _abandon(self, work: asyncio.Future[Any]) -> None:
        self.cut()
        await asyncio.wait({work})
        work.exception() if not work.cancelled() else None

    async def _execute(self, text: str) -> Sequence[Sequence[Any]]:
        cursor = await self._connection.execute(text.encode())
        return await cursor.fetchall() if cursor.description else []

    async def stream(self, start_command: str, *, timeout: float | None = None) -> None:
        """Begin to stream."""
        await self.command(start_command, timeout=timeout)
        self._pgconn.nonblocking = 1
        self._connection.add_notice_handler(self._noticed)

    def _noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        # From PostgreSQL 18 on, what is written after the publication was dropped is left out of
        # the stream with a warning; before, that is an error, which ends the stream.
        if notice.sqlstate == "55000":
            self._warning = notice.message_primary

    async def receive(self) -> list[bytes]:
        """The next messages, at least one; raises `StreamEnded` when there will be no more."""
        while True:
            batch = self._batch()
            if self._warning is not None:
                raise StreamEnded(self._warning)
            if batch:
                return batch
            await self._readable()
            if self._flooded:
                # It comes without a pause: let some gather, and the server send full packets.
                await asyncio.sleep(NAP)
            self._pgconn.consume_input()

    def _batch(self) -> list[bytes]:
        batch: list[bytes] = []
        take = self._pgconn.get_copy_data
        while len(batch) < BATCH:
            size, data = take(1)
            if size > 0:
                batch.append(bytes(data))
                continue
            if size < 0 and not batch:
                raise StreamEnded(self._ending())
            break
        self._flooded = len(batch) > 1
        return batch

    def _ending(self) -> str:
        result = self._pgconn.get_result()
        said = result.get_error_message() if result is not None else ""
        return said or "the server ended the stream"

    async def send(self, message: bytes) -> None:
        """Tell the server something."""
        self._pgconn.put_copy_data(message)
        while self._pgconn.flush():
            await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def close(self) -> None:
        """Close it."""
        await self._connection.close()

    def cut(self) -> None:
        """End it from below; whoever waits on it is told at once."""
        with (
            contextlib.suppress(OSError, psycopg.Error),
            socket.socket(fileno=os.dup(self._pgconn.socket)) as line,
        ):
            line.shutdown(socket.SHUT_RDWR)

    async def _readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _ready(self, add: Any, remove: Any) -> None:
        ready = self._loop.create_future()

        def tell() -> None:
            if not ready.done():
                ready.set_result(None)

        try:
            fd = self._pgconn.socket
        except psycopg.OperationalError as error:
            raise StreamEnded(f"the connection is closed: {error}") from None
        add(fd, tell)
        try:
            await ready
        finally:
            remove(fd)

    def __repr__(self) -> str:
        return f"<Link {'closed' if self.closed else 'open'}>"
