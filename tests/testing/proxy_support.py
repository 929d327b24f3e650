"""An echo server to put behind a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

__all__ = ["echo_server", "read_all"]


@asynccontextmanager
async def echo_server(path: Path | None = None) -> AsyncIterator[int]:
    """Run an echo server on a port, which is yielded, or on a Unix socket."""
    handlers: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            handlers.discard(task)
            writer.close()

    if path is None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
    else:
        server = await asyncio.start_unix_server(echo, path)
    try:
        yield 0 if path else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def read_all(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Read to the end; return the bytes, and whether the end was a reset."""
    data = bytearray()
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False
