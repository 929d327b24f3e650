"""One direct connection for replication: commands first, then the stream.

psycopg has no words for the stream, so this talks to libpq, which has; and, where the line is not
encrypted, to the line itself, which is quicker. Reading is done in batches: a reader that wakes up
for every message keeps the sender from filling its packets.
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
from psycopg import pq

from .._errors import StreamEnded
from ..server import connect, cut, uncancelled
from ._frames import STARTED, CopyFrames, framed

__all__ = ["KEEPALIVES", "ReplicationLink"]

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
#: It comes without a pause when so much of it came since the last pause; and what is there is all
#: taken when there was less than this.
FLOOD, LITTLE = 16 * 2**10, 8 * 2**10
#: How much is handed on at a time, and how much a message counts for beyond its own bytes: some
#: hundred rows, so that nothing else waits for long, and that they are consumed while they are
#: still in the processor's cache, before the garbage collector finds that there are many of them.
BATCH, EACH = 192 * 2**10, 400
#: The same, as bytes of the line.
CHUNK = 48 * 2**10


class ReplicationLink:
    """A connection that speaks the replication protocol."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._loop = asyncio.get_running_loop()
        # How much has come since the last pause, and whether there was little the last time.
        self._came = 0
        self._drained = False
        #: How often bytes have arrived: each time is a sign of life, also within a long message.
        self.arrivals = 0
        self._broken: psycopg.Error | None = None
        # The line itself, if it is read without libpq.
        self._line: socket.socket | None = None
        self._frames = CopyFrames()
        self._unsent = bytearray()
        self._warning: str | None = None

    @classmethod
    async def dial(cls, conninfo: str, *, timeout: float = 30.0, **options: Any) -> ReplicationLink:
        """Open one."""
        async with asyncio.timeout(timeout):
            connection = await connect(conninfo, replication="database", **options)
        return cls(connection)

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._connection.closed or self._broken is not None

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
        try:
            return await uncancelled(self._connection, self._execute(text), timeout)
        except TimeoutError as error:
            raise StreamEnded(f"{error}: {text[:80]}") from None

    async def _execute(self, text: str) -> Sequence[Sequence[Any]]:
        if text.startswith("START_REPLICATION"):
            await self._start(text)
            return []
        cursor = await self._connection.execute(text.encode())
        return await cursor.fetchall() if cursor.description else []

    async def stream(self, start_command: str, *, timeout: float | None = None) -> None:
        """Begin to stream."""
        self._connection.add_notice_handler(
            lambda said: self._noticed(said.sqlstate, said.message_primary)
        )
        await self.command(start_command, timeout=timeout)

    async def _start(self, text: str) -> None:
        pgconn = self._pgconn
        pgconn.nonblocking = 1
        pgconn.send_query(text.encode())
        while pgconn.flush():
            await self._ready(self._loop.add_writer, self._loop.remove_writer)
        await self._readable()
        line = socket.socket(fileno=os.dup(pgconn.socket))
        # An encrypted line says something else, and so does a server that refuses.
        with contextlib.suppress(OSError):
            if line.recv(len(STARTED), socket.MSG_PEEK) == STARTED:
                line.recv(len(STARTED))
                self._line = line
                return
        line.close()
        while pgconn.is_busy():
            await self._readable()
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            raise psycopg.errors.error_from_result(result) if result else StreamEnded("no answer")

    def _noticed(self, sqlstate: str | None, text: str | None) -> None:
        # From PostgreSQL 18 on, what is written after the publication was dropped is left out of
        # the stream with a warning; before, that is an error, which ends the stream.
        # A stream that waits for a standby says so in the same way, and goes on by itself.
        if sqlstate == "55000" and "synchronized_standby_slots" not in (text or ""):
            self._warning = text

    async def receive(self) -> list[bytes]:
        """The next messages, at least one; raises `StreamEnded` when there will be no more."""
        while True:
            if self._drained and self._came > FLOOD:
                # It comes without a pause: let some gather, and the server send full packets.
                self._came = 0
                await asyncio.sleep(NAP)
            batch = self._batch() if self._line is None else self._read(self._line)
            if self._warning is not None:
                raise StreamEnded(self._warning)
            if batch:
                return batch
            if self._frames.ended is not None:
                raise StreamEnded(self._frames.ended)
            if self._came <= FLOOD:
                self._came = 0
                await self._readable()
                self.arrivals += 1

    def _read(self, line: socket.socket) -> list[bytes]:
        """What has come, from the line itself."""
        frames = self._frames
        if frames.ended is not None:
            raise StreamEnded(frames.ended)
        try:
            data = line.recv(CHUNK)
        except BlockingIOError:
            self._drained = True
            return []
        except OSError as error:
            self._broken = psycopg.OperationalError(f"receiving failed: {error}")
            raise self._broken from error
        if not data:
            self._broken = psycopg.OperationalError("server closed the connection unexpectedly")
            raise self._broken
        self.arrivals += 1
        self._came += len(data)
        self._drained = len(data) < LITTLE
        batch = frames.cut(data)
        if frames.notice is not None:
            self._noticed(*frames.notice)
            frames.notice = None
        return batch

    def _batch(self) -> list[bytes]:
        """What has come, by libpq."""
        if self._broken is not None:
            raise self._broken
        batch: list[bytes] = []
        take, append = self._pgconn.get_copy_data, batch.append
        left, asked = BATCH, False
        while left > 0:
            size, data = take(1)
            if size > 0:
                append(bytes(data))
                left -= size + EACH
                asked = False
            elif size == 0 and not asked:
                # libpq gives what it has read; there may be more to read.
                asked = True
                if not self._consume(batch):
                    break
            elif size < 0 and not batch:
                raise StreamEnded(self._ending())
            else:
                break
        self._came += BATCH - left
        self._drained = BATCH - left < LITTLE
        return batch

    def _consume(self, batch: list[bytes]) -> bool:
        """Read what has come; if that fails, what was read before goes first."""
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            if not batch:
                raise
            self._broken = error
            return False
        return True

    def _ending(self) -> str:
        result = self._pgconn.get_result()
        said = result.get_error_message() if result is not None else ""
        return said or "the server ended the stream"

    async def send(self, message: bytes) -> None:
        """Tell the server something."""
        flush = self._pgconn.flush
        if self._line is None:
            self._pgconn.put_copy_data(message)
        else:
            self._unsent += framed(message)
            flush = self._flush
        while flush():
            await self._ready(self._loop.add_writer, self._loop.remove_writer)

    def _flush(self) -> int:
        """Send what can be sent; what is left is not nothing."""
        assert self._line is not None
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self._line.send(self._unsent)]
        return len(self._unsent)

    async def close(self) -> None:
        """Close it; the server is told so, unless it was cut or a message is half sent."""
        if self._unsent:
            self.cut()
        if self._line is not None:
            self._line.close()
        await self._connection.close()

    def cut(self) -> None:
        """End the connection by its socket."""
        cut(self._connection)

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
        return f"<ReplicationLink {'closed' if self.closed else 'open'}>"
