"""A TCP server that sends scripted bytes, and otherwise relays to a real server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from tests.stream_server import stream_server

__all__ = ["LinkScript", "MisbehavingServer"]

#: How long to wait for more bytes of the real server, in seconds.
PAUSE = 0.02


@dataclass(frozen=True)
class LinkScript:
    """What the server does on one link."""

    #: The bytes to send, piece by piece.
    pieces: tuple[bytes, ...]
    #: How many bytes of the real server to relay before them.
    relay_first: int = 0
    #: Whether the link is reset at the end, instead of closed.
    reset: bool = False


class MisbehavingServer:
    """The server; each link plays the next script, and is relayed when none is left.

    :param port: the port of the real server.
    """

    def __init__(self, port: int) -> None:
        self._real_port = port
        self.port = 0
        listener = socket.create_server(("127.0.0.1", 0))
        # A small receive buffer, so that the client soon notices that nothing is read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._server = stream_server(self._accept, sock=listener)
        self.scripts: deque[LinkScript] = deque()
        #: Bytes to send in place of the scripts, without ever reading.
        self.flood: Callable[[], Iterable[bytes]] | None = None
        self.flooded = 0
        #: Open links that play a script.
        self.scripted_links = 0

    async def __aenter__(self) -> Self:
        self.port = await self._server.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._server.__aexit__(*raised)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self.scripts.popleft() if self.scripts else None
        try:
            if self.flood is not None:
                await self._flood(writer, self.flood)
            elif script is None:
                await self._relay(reader, writer)
            else:
                self.scripted_links += 1
                try:
                    await self._play(script, reader, writer)
                finally:
                    self.scripted_links -= 1
        finally:
            writer.transport.abort()

    async def _flood(
        self, writer: asyncio.StreamWriter, flood: Callable[[], Iterable[bytes]]
    ) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for piece in flood():
            writer.write(piece)
            self.flooded += len(piece)
            await writer.drain()
        writer.write_eof()  # the client sees it after the whole flood
        await writer.wait_closed()

    async def _play(
        self, script: LinkScript, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if script.relay_first:
            await self._relay_some(script.relay_first, reader, writer)
        for piece in script.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not script.reset:
            writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while await reader.read(65536):
                        pass

    async def _relay_some(
        self, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay up to `size` bytes of the real server, or as many as it sends without a pause."""
        there, back = await asyncio.open_connection("127.0.0.1", self._real_port)
        pump = asyncio.create_task(_pump(reader, back))
        try:
            while size > 0:
                async with asyncio.timeout(PAUSE):
                    data = await there.read(size)
                if not data:
                    return
                size -= len(data)
                writer.write(data)
        except TimeoutError:
            pass
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            back.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._real_port)
        pump = asyncio.create_task(_pump(reader, back))
        try:
            await _pump(there, writer)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            back.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
