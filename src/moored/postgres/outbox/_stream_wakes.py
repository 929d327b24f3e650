"""Wake-ups by the change stream of a `Postgres`, for publishers too fast for NOTIFY."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..report import Health

if TYPE_CHECKING:
    from .._postgres import Postgres


class StreamWakes:
    """Yields the ID of each committed transaction that has published.

    A trigger writes a transactional message into the WAL, which takes no lock of the whole server,
    as NOTIFY does. Of several processes with one `stream_id`, one has the stream, and sends the
    others notifications.
    """

    def __init__(self, pg: Postgres) -> None:
        self._pg = pg

    @property
    def up(self) -> bool:
        """Whether this process has the stream, and it flows."""
        return self._pg.is_open and self._pg.health is Health.ACTIVE

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[object]]:
        """Subscribe to the transactions that publish to the outbox with this channel."""
        found: asyncio.Queue[int] = asyncio.Queue()
        with self._pg.published.subscribed(channel, found.put_nowait):
            yield _items(found)


async def _items(found: asyncio.Queue[int]) -> AsyncGenerator[object, None]:
    while True:
        yield await found.get()
