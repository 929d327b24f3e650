"""Read the rows of a COPY from the socket of an unencrypted connection.

libpq returns one row per call, which takes longer than the server needs to send it. So the bytes
are read here, up to the end of the rows; what the server sends after it is left to libpq, for which
the command was one without rows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator, Generator
from typing import Any

import psycopg
from psycopg import pq
from psycopg.waiting import Wait

from .._errors import DecodeError

__all__ = ["BLOCK_BYTES", "CopyRows", "copy_blocks", "finish", "read_more"]

#: Bytes that are read at once.
CHUNK = 1 << 20
#: Bytes of a block, at least, unless it is the last one.
BLOCK_BYTES = 1 << 17
#: How long data may accumulate before it is read, in seconds.
NAP = 0.0002

_head = struct.Struct("!BI")
_DATA, _DONE, _ERROR = b"dcE"
#: The beginning of a row of less than 64 KiB, without its length, also after another row.
_SHORT = b"d\0\0"
_NEXT = b"\n" + _SHORT
#: The head of the response, notices, parameters and notifications: not needed.
_OTHERS = b"HcNSA"


class CopyRows:
    """Finds the rows in what the server sends for a COPY."""

    def __init__(self) -> None:
        #: The rows, in one or more parts each.
        self.parts: list[bytes] = []
        self.size = 0
        #: Whether the rows have ended, or the server has reported an error.
        self.ended = False
        #: The bytes of the last row that have not arrived yet.
        self.missing = 0

    def take(self, data: bytes) -> int:
        """Add the rows; return how many of these bytes are not needed any more."""
        at, length, quick = min(self.missing, len(data)), len(data), True
        if at:
            self._add(data[:at])
            self.missing -= at
        while at <= length - 5:
            if quick and data.startswith(_SHORT, at):
                after = self._take_short(data, at)
                quick, at = after > at, after
                continue
            kind, size = _head.unpack_from(data, at)
            end: int = at + 1 + size
            if kind == _ERROR:
                self.ended = True
                return at  # libpq raises it
            if kind == _DATA:
                self._add(data[at + 5 : end])
                if end > length:
                    self.missing = end - length
                    return length
            elif kind not in _OTHERS:
                raise DecodeError(
                    "the connection is encrypted by GSSAPI, or not a PostgreSQL's: set "
                    "gssencmode=disable in its URL to copy a table"
                )
            elif end > length:
                return at
            at = end
            if kind == _DONE:
                self.ended = True
                return at
        return at

    def _take_short(self, data: bytes, at: int) -> int:
        """Add all rows but the last, which may be incomplete; return where the last one begins.

        A row in text format has a newline at its end and nowhere else, and no zero byte. So all
        rows of less than 64 KiB are split at once, which takes a fifth of the time.
        """
        end = data.rfind(_NEXT, at) + 1
        if end <= at:
            return at
        rows = data[at + len(_SHORT) : end - 1].split(_NEXT)
        found = b"\n".join([row[2:] for row in rows])
        if b"\0" in found:  # a notice, or a long row
            return at
        self._add(found)
        self._add(b"\n")
        return end

    def _add(self, part: bytes) -> None:
        self.parts.append(part)
        self.size += len(part)

    def block(self) -> bytes:
        """Return the rows, and forget them."""
        found = b"".join(self.parts)
        self.parts.clear()
        self.size = 0
        return found


async def copy_blocks(
    conn: psycopg.AsyncConnection[Any], query: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield whole rows in blocks; a caller that stops before the end closes the connection."""
    pgconn, rows = conn.pgconn, CopyRows()
    async with conn.lock:
        try:
            pgconn.send_query(query)
            while pgconn.flush():
                await conn.wait(_writable())
            with socket.socket(fileno=os.dup(pgconn.socket)) as line:
                while not rows.ended:
                    taken = rows.take(await _peek(conn, line))
                    line.recv(taken)
                    if not taken and not rows.ended:
                        await asyncio.sleep(NAP)  # the head of a message is incomplete
                    if rows.size >= BLOCK_BYTES and not rows.missing:
                        yield rows.block()
            await finish(conn)
        except BaseException:
            if pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                pgconn.finish()
            raise
    if rows.parts:
        yield rows.block()


async def _peek(conn: psycopg.AsyncConnection[Any], line: socket.socket) -> bytes:
    """Return what the server has sent, and leave it in the socket."""
    while True:
        try:
            data = line.recv(CHUNK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            # Let data accumulate: to wake up for each packet would slow the server.
            await asyncio.sleep(NAP)
            await conn.wait(_readable())
            continue
        if not data:
            raise psycopg.OperationalError("the server has closed the connection")
        return data


def _readable() -> Generator[Wait, Any, None]:
    yield Wait.R


def _writable() -> Generator[Wait, Any, None]:
    yield Wait.W


def read_more(pgconn: pq.abc.PGconn) -> Generator[Wait, Any, None]:
    """Wait until libpq can read, and let it."""
    yield Wait.R
    pgconn.consume_input()


async def finish(conn: psycopg.AsyncConnection[Any]) -> None:
    """Read the end of a COPY, and raise the server's error if it has failed."""
    pgconn = conn.pgconn
    while True:
        while pgconn.is_busy():
            await conn.wait(read_more(pgconn))
        result = pgconn.get_result()
        if result is None:
            return
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
