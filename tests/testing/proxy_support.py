"""A server that echoes, to have bytes go through a proxy and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

__all__ = ["echo_server", "read_all"]


@asynccontextmanager
async def echo_server(path: Path | None = None) -> AsyncIterator[int]:
    """Echo everything, then the end; yields the port."""
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
    """What comes until the end, and whether that was a reset."""
    data = bytearray()
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False
