"""A replication connection: commands first, then the stream.

psycopg has no interface for the stream, so this module uses libpq's, or, if the connection is not
encrypted, the socket itself, which is faster. Messages are read in batches: a reader that wakes up
for each message keeps the sender from filling its packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import pq

from .._errors import StreamEnded
from ..server import connect, cut, has_input, uncancelled
from ._frames import STARTED, CopyFrames, framed

__all__ = ["KEEPALIVES", "ReplicationLink"]

#: TCP settings that detect within 10 s that the peer has vanished.
KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": 3,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 9000,
}

#: The timeout of a cancel request, in seconds.
CANCEL = 5.0
#: How long data may accumulate when it arrives without a pause, in seconds.
NAP = 0.0005
#: Data arrives without a pause if more than FLOOD bytes arrived since the last one; a read of less
#: than LITTLE bytes has emptied the socket.
FLOOD, LITTLE = 16 * 2**10, 8 * 2**10
#: The size of a batch in bytes, and what each message counts in addition: some hundred rows, so
#: that other tasks don't wait for long, and rows are consumed while they are in the processor's
#: cache and before they trigger the garbage collector.
BATCH, EACH = 192 * 2**10, 400
#: The same for a read from the socket.
CHUNK = 48 * 2**10


class ReplicationLink:
    """A connection that speaks the replication protocol."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._loop = asyncio.get_running_loop()
        # Bytes since the last pause, and whether the last read has emptied the socket.
        self._came = 0
        self._drained = False
        #: How often bytes have arrived: each is a sign of life, also within a long message.
        self.arrivals = 0
        self._broken: psycopg.Error | None = None
        # The socket, if it is read without libpq.
        self._line: socket.socket | None = None
        self._frames = CopyFrames()
        self._unsent = bytearray()
        self._warning: str | None = None

    @classmethod
    async def dial(cls, conninfo: str, *, timeout: float = 30.0, **options: Any) -> ReplicationLink:
        """Open a replication connection."""
        async with asyncio.timeout(timeout):
            connection = await connect(conninfo, replication="database", **options)
        return cls(connection)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or broken."""
        return self._connection.closed or self._broken is not None

    @property
    def has_input(self) -> bool:
        """Whether there are bytes that were not read yet."""
        return has_input(self._pgconn.socket)

    async def command(self, text: str, *, timeout: float | None = None) -> Sequence[Sequence[Any]]:
        """Send a command and return its rows.

        On cancellation or timeout the connection is aborted: the driver would send a cancel request
        to a server that may be unreachable.
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
        """Start the stream."""
        self._connection.add_notice_handler(
            lambda notice: self._noticed(notice.sqlstate, notice.message_primary)
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
        # The first bytes are others if the connection is encrypted, or if the server refuses.
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
            if result is None:
                raise StreamEnded("the server did not answer START_REPLICATION")
            raise psycopg.errors.error_from_result(result)

    def _noticed(self, sqlstate: str | None, text: str | None) -> None:
        # From PostgreSQL 18 on, the server leaves out changes that were made after the publication
        # was dropped, with a warning; earlier versions end the stream with an error. A stream that
        # waits for a standby has the same SQLSTATE, and continues by itself.
        if sqlstate == "55000" and "synchronized_standby_slots" not in (text or ""):
            self._warning = text

    async def receive(self) -> list[bytes]:
        """Return the next messages, at least one; raise `StreamEnded` when there are no more."""
        while True:
            if self._drained and self._came > FLOOD:
                # Data arrives without a pause: let it accumulate, so that packets are full.
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
        """Read messages from the socket."""
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
        """Read messages with libpq."""
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
                # libpq returns what it has read already; the socket may have more.
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
        """Let libpq read the socket; if that fails, deliver the earlier messages first."""
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
        text = result.get_error_message() if result is not None else ""
        return text or "the server ended the stream"

    async def send(self, message: bytes) -> None:
        """Send a message to the server."""
        flush = self._pgconn.flush
        if self._line is None:
            self._pgconn.put_copy_data(message)
        else:
            self._unsent += framed(message)
            flush = self._flush
        while flush():
            await self._ready(self._loop.add_writer, self._loop.remove_writer)

    def _flush(self) -> int:
        """Send what the socket accepts; return the number of bytes that are left."""
        assert self._line is not None
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self._line.send(self._unsent)]
        return len(self._unsent)

    async def close(self) -> None:
        """Close the connection, with a Terminate message unless it was aborted or mid-message."""
        if self._unsent:
            self.cut()
        if self._line is not None:
            self._line.close()
        await self._connection.close()

    async def cancel(self, timeout: float = CANCEL) -> None:
        """Cancel the statement that runs, whose sender gets the server's error."""
        await self._connection.cancel_safe(timeout=timeout)

    def cut(self) -> None:
        """Abort the connection by its socket."""
        cut(self._connection)

    async def _readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _ready(self, add: Any, remove: Any) -> None:
        ready = self._loop.create_future()

        def notify() -> None:
            if not ready.done():
                ready.set_result(None)

        try:
            fd = self._pgconn.socket
        except psycopg.OperationalError as error:
            raise StreamEnded(f"the connection is closed: {error}") from None
        add(fd, notify)
        try:
            await ready
        finally:
            remove(fd)
