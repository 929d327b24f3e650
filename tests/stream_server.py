"""A server for tests, made of asyncio's streams, that leaves no connection open."""

from __future__ import annotations

import asyncio
import inspect
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

__all__ = ["Handler", "stream_server"]

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def stream_server(
    handler: Handler,
    host: str | Sequence[str] | None = "127.0.0.1",
    *,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    sock: socket.socket | None = None,
    path: Path | None = None,
) -> AsyncIterator[int]:
    """Serve on a port, which is yielded, or on a Unix socket.

    Close a connection when its handler, a function or a coroutine, has returned, or has met the
    client's end. At the end of the block, abort all connections, cancel the handlers, and wait for
    both: a transport that is open when its event loop closes is an error.
    """
    served: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, EOFError):
                result = handler(reader, writer)
                if inspect.isawaitable(result):
                    await result
        finally:
            writer.close()

    # Given a coroutine, asyncio reports its cancellation as an error.
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append((writer, asyncio.create_task(serve(reader, writer))))

    if path is not None:
        server = await asyncio.start_unix_server(accept, path)
    elif sock is not None:
        server = await asyncio.start_server(accept, sock=sock)
    else:
        server = await asyncio.start_server(accept, host, port, ssl=tls)
    try:
        yield 0 if path else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(3):
            await asyncio.sleep(0)  # a connection that is being accepted gets its handler
        for writer, _ in served:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
        for _, task in served:
            task.cancel()
        for error in await asyncio.gather(*(task for _, task in served), return_exceptions=True):
            if isinstance(error, Exception):
                raise error
