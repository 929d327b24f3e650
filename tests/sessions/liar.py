"""A TCP server that says whatever it is told to, and otherwise leads to an honest one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["Liar", "Lie"]

#: How long to wait for something more to be said, where nobody knows whether there is more.
PAUSE = 0.02


@dataclass(frozen=True)
class Lie:
    """What happens on one link."""

    #: What is said, piece by piece.
    pieces: tuple[bytes, ...]
    #: How many bytes of the honest server come before that.
    honest: int = 0
    #: Whether the link is reset at the end, or closed.
    reset: bool = False


class Liar:
    """The server; each link takes the next lie, and is honest when there is none left.

    :param port: where the honest server is.
    """

    def __init__(self, port: int) -> None:
        self._honest_port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.lies: deque[Lie] = deque()
        #: Says much, in place of the lies, and never reads.
        self.flood: Callable[[], Iterable[bytes]] | None = None
        self.flooded = 0
        #: Links that are being lied to.
        self.lying = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        # Little room for what nobody reads, so that it is noticed soon.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._server = await asyncio.start_server(self._accept, sock=listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        lie = self.lies.popleft() if self.lies else None
        try:
            if self.flood is not None:
                await self._flood(writer, self.flood)
            elif lie is None:
                await self._relay(reader, writer)
            else:
                self.lying += 1
                try:
                    await self._lie(lie, reader, writer)
                finally:
                    self.lying -= 1
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _flood(
        self, writer: asyncio.StreamWriter, flood: Callable[[], Iterable[bytes]]
    ) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for piece in flood():
            writer.write(piece)
            self.flooded += len(piece)
            await writer.drain()
        writer.write_eof()  # the client comes to this when it has taken all of it
        await writer.wait_closed()

    async def _lie(
        self, lie: Lie, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if lie.honest:
            await self._be_honest(lie.honest, reader, writer)
        for piece in lie.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not lie.reset:
            writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while await reader.read(65536):
                        pass

    async def _be_honest(
        self, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Let so many bytes of the honest server pass, or as many as there are for now."""
        there, back = await asyncio.open_connection("127.0.0.1", self._honest_port)
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
        there, back = await asyncio.open_connection("127.0.0.1", self._honest_port)
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
