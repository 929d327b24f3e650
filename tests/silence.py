"""A server that takes connections and never says a word."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Silence", "silence"]


class Silence:
    """Somebody listens, and can tell whether a caller came and went."""

    def __init__(self) -> None:
        self.port = 0
        self.came, self.gone = asyncio.Event(), asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear what a caller says until it hangs up."""
        try:
            while await reader.read(4096):
                self.came.set()
        except OSError:
            pass  # that is hanging up, too
        self.gone.set()
        writer.close()


@asynccontextmanager
async def silence() -> AsyncIterator[Silence]:
    """The server; without a garbage collection, which would tidy up after those who do not."""
    it = Silence()
    server = await asyncio.start_server(it.take, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    gc.disable()
    try:
        yield it
    finally:
        gc.enable()
        server.close()
