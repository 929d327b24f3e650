"""Receivers and servers for tests of transports."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.stream_server import Handler, stream_server
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from moored.sessions.transport._transport import Transport

__all__ = ["Echo", "FailingReceiver", "RecordingReceiver", "tcp_server", "websocket_server"]

PATIENCE = 30.0


class RecordingReceiver:
    """Records what it receives, and checks that nothing arrives after the end."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.end: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._changed: asyncio.Event = asyncio.Event()

    def received(self, data: bytes) -> None:
        assert not self.end.done(), "data was received after the end"
        assert type(data) is bytes
        assert data
        self.pieces.append(data)
        self.size += len(data)
        self._changed.set()

    def lost(self, error: BaseException | None) -> None:
        assert not self.end.done(), "the end was reported twice"
        self.end.set_result(error)
        self._changed.set()

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    async def receives(self, size: int) -> bytes:
        """Wait for that many bytes, and return all data."""
        async with asyncio.timeout(PATIENCE):
            while self.size < size:
                assert not self.end.done(), f"lost: {self.end.result()!r}"
                self._changed.clear()
                await self._changed.wait()
        return self.data

    async def ended(self) -> BaseException | None:
        """Wait for the end and a few loop iterations more, and return its error."""
        async with asyncio.timeout(PATIENCE):
            error = await self.end
        for _ in range(5):
            await asyncio.sleep(0)
        return error


class FailingReceiver(RecordingReceiver):
    """A receiver that raises for everything it receives."""

    def received(self, data: bytes) -> None:
        super().received(data)
        raise LookupError("cannot handle this")


class Echo:
    """The server's end of a link in memory; sends everything back."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.end: list[BaseException | None] = []

    def received(self, data: bytes) -> None:
        self.transport.write(data)

    def lost(self, error: BaseException | None) -> None:
        self.end.append(error)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def tcp_server(
    handler: Handler = echo, tls: ssl.SSLContext | None = None
) -> AbstractAsyncContextManager[int]:
    """Serve on a free port, and yield its number."""
    return stream_server(handler, tls=tls)


async def websocket_echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@asynccontextmanager
async def websocket_server(
    handler: Callable[[ServerConnection], object] = websocket_echo,
    *,
    tls: ssl.SSLContext | None = None,
    **options: object,
) -> AsyncIterator[int]:
    """Serve WebSockets on a free port, and yield its number."""

    async def handle(connection: ServerConnection) -> None:
        try:
            result = handler(connection)
            if asyncio.iscoroutine(result):
                await result
        except ConnectionClosed:
            pass

    async with serve(handle, "127.0.0.1", 0, ssl=tls, compression=None, **options) as server:  # type: ignore[arg-type]
        yield next(iter(server.sockets)).getsockname()[1]
