"""Wake-ups by the change stream of a `Postgres`, for publishers too fast for NOTIFY."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from .._errors import ConfigurationError
from ..consume import Reset
from ..decode import Emitted
from ..report import Health

if TYPE_CHECKING:
    from .._postgres import Postgres


class StreamWakes:
    """Yields an item for each committed transaction that has published.

    A trigger writes a transactional message into the WAL, which takes no lock of the whole server,
    as NOTIFY does. Of several processes with one `stream_id`, one has the stream: the others poll.
    """

    def __init__(self, pg: Postgres) -> None:
        if not pg.settings.messages:
            raise ConfigurationError(
                'wake="stream" needs the messages of the stream: use Postgres(…, messages=True)'
            )
        self._pg = pg

    @property
    def up(self) -> bool:
        """Whether this process has the stream, and it flows."""
        return self._pg.is_open and self._pg.health is Health.ACTIVE

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[object]]:
        """Follow the stream as a consumer, which is dropped at the end, so that no WAL is kept."""
        name = f"wake-ups of {channel}"
        try:
            async with aclosing(self._woken(name, channel)) as events:
                yield events
        finally:
            if self._pg.is_open:
                await self._pg.drop_consumer(name)

    async def _woken(self, name: str, channel: str) -> AsyncGenerator[object, None]:
        async with self._pg.changes(name) as changes:
            async for txn in changes:
                if isinstance(txn, Reset):
                    yield txn
                    continue
                if any(isinstance(each, Emitted) and each.prefix == channel for each in txn):
                    yield txn.xid
                await txn.ack()
