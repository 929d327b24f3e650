"""An echo server to put behind a proxy."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.stream_server import stream_server

__all__ = ["echo_server", "read_all"]


def echo_server(path: Path | None = None) -> AbstractAsyncContextManager[int]:
    """Run an echo server on a port, which is yielded, or on a Unix socket."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    return stream_server(echo, path=path)


async def read_all(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """Read to the end; return the bytes, and whether the end was a reset."""
    data = bytearray()
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        return bytes(data), True
    return bytes(data), False
