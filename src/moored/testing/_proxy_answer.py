"""Answers to connections over the rate limit, in the protocol of the server."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

__all__ = ["Answer", "Caller", "postgres_fatal"]

_CANCEL, _SSL, _GSS = 80877102, 80877103, 80877104
_LONGEST_STARTUP = 10_000


class Caller:
    """The connection of a client over the rate limit, for an `Answer` to read and write."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, size: int) -> bytes:
        """Read exactly `size` bytes; raise EOFError if the client closes before."""
        data = b""
        while len(data) < size:
            more = await self._loop.sock_recv(self._socket, size - len(data))
            if not more:
                raise EOFError(f"the client closed after {len(data)} of {size} bytes")
            data += more
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the client."""
        await self._loop.sock_sendall(self._socket, data)

    async def hang_up(self) -> None:
        """Close the sending side, and wait until the client closes its own."""
        self._socket.shutdown(socket.SHUT_WR)
        while await self._loop.sock_recv(self._socket, 4096):
            pass


#: Answers a client over the rate limit; the connection is closed when the call returns.
Answer = Callable[[Caller], Awaitable[None]]


def postgres_fatal(
    code: str = "53400", message: str = "too many new connections per second"
) -> Answer:
    """Return an answer that sends PostgreSQL clients the FATAL error `code`.

    The answer declines encryption requests and waits for the startup message first: a client
    accepts no error before that.
    """
    if len(code) != 5:
        raise ValueError(f"{code!r} is not a SQLSTATE, which has five characters")
    fields = (b"SFATAL", b"VFATAL", f"C{code}".encode(), f"M{message}".encode())
    body = b"".join(field + b"\0" for field in fields) + b"\0"
    error = b"E" + struct.pack("!I", len(body) + 4) + body

    async def answer(caller: Caller) -> None:
        while True:
            (size,) = struct.unpack("!I", await caller.read(4))
            if not 8 <= size <= _LONGEST_STARTUP:
                return
            (kind,) = struct.unpack("!I", (await caller.read(size - 4))[:4])
            if kind == _CANCEL:
                return
            if kind not in (_SSL, _GSS):
                break
            await caller.write(b"N")
        await caller.write(error)
        await caller.hang_up()

    return answer
