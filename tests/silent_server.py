"""A TCP server that accepts connections and never replies."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.stream_server import stream_server

__all__ = ["SilentServer", "silent_server"]


class SilentServer:
    """Reports whether a client has connected and sent bytes, and whether it has closed."""

    def __init__(self) -> None:
        self.port = 0
        self.arrived, self.gone = asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read until the client closes."""
        with suppress(OSError):  # a reset is a close, too
            while await reader.read(4096):
                self.arrived.set()
        self.gone.set()


@asynccontextmanager
async def silent_server() -> AsyncIterator[SilentServer]:
    """Run the server with the garbage collector off, which could close leaked connections."""
    silent = SilentServer()
    async with stream_server(silent.serve) as silent.port:
        gc.disable()
        try:
            yield silent
        finally:
            gc.enable()
