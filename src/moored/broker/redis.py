"""Events through Redis Streams, for fleets whose nodes must not all read one database.

::

    events = RedisEvents("redis://127.0.0.1")
    broker = Broker(events, replay=events, channels=["orders"])
    await events.publish("orders", payload, tenant=org_id)

An id is that of the stream's entry, so a client may resume at any node. Needs `moored[redis]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from moored.kernel import SECRETS, extra

from ._events import HistoryLost, SourceEvent, SourceGap
from .postgres import OutboxLike

with extra("redis", "moored.broker.redis"):
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError

__all__ = ["RedisEvents"]

#: Milliseconds for which a read waits on the server, and how many entries it returns.
BLOCK, BATCH = 5_000, 500
Position = tuple[int, int]
START: Position = (0, 0)


class RedisEvents:
    """A Redis stream as the source of a broker, and as its history.

    :param url: `redis://`, `rediss://` or `unix://`.
    :param key: the key of the stream.
    :param keep: about how many events the history keeps.
    """

    def __init__(self, url: str, *, key: str = "moored:events", keep: int = 100_000) -> None:
        SECRETS.add_from(url)
        # A read waits for BLOCK; the socket's timeout finds a server that has vanished.
        self._client: Any = Redis.from_url(
            url, decode_responses=True, socket_timeout=BLOCK / 1000 + 5, socket_connect_timeout=5
        )
        self._key = key
        self._keep = keep
        self._last: Position | None = None

    async def publish(self, channel: str, payload: str, *, tenant: str | None = None) -> str:
        """Add an event, and return its id.

        Raises redis-py's `ConnectionError` if the connection was lost: the event may have been
        added or not.
        """
        fields: dict[Any, Any] = {"channel": channel, "payload": payload}
        if tenant is not None:
            fields["tenant"] = tenant
        found: str = await self._client.xadd(self._key, fields, maxlen=self._keep, approximate=True)
        return found

    async def copy(self, outbox: OutboxLike) -> None:
        """Copy the events of an outbox into the stream, without end.

        Run it in one process at a time, for example under an exclusive lease; the next one goes on
        where the last one ended. An entry has the order of the outbox as its id, so copying an
        event twice has no effect. If the outbox is reset, the stream is emptied.
        """
        newest = await self._client.xrevrange(self._key, count=1)
        cursor = newest[0][1].get("cursor") if newest else None
        async for batch in outbox.tail(cursor):
            if batch.reset is not None:
                await self._client.delete(self._key)
            for event in batch.events:
                fields = {"channel": event.channel, "payload": event.payload}
                if event.tenant is not None:
                    fields["tenant"] = event.tenant
                fields["cursor"] = event.cursor
                await self._copy(_text(outbox.place(event.cursor)), fields)

    async def _copy(self, id: str, fields: dict[str, str]) -> None:
        try:
            await self._client.xadd(self._key, fields, id, maxlen=self._keep, approximate=True)
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise  # else another process has copied it

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    # -- the source ----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        """Yield new entries; after an error, from the last one on."""
        if self._last is None:
            self._last = await self._newest()
            yield SourceGap("the source has begun")
        elif not await self._has(self._last):
            self._last = await self._newest()
            yield SourceGap("entries of the Redis stream were lost")
        while True:
            found = await self._client.xread(
                {self._key: _text(self._last)}, count=BATCH, block=BLOCK
            )
            if not found and not await self._has(self._last):
                self._last = await self._newest()
                yield SourceGap("entries of the Redis stream were lost")
            for id, fields in _entries(found):
                event = _event(id, fields)
                self._last = event.position
                yield event

    # -- the history ---------------------------------------------------------------------------

    def position(self, id: str) -> Position:
        """Return the two numbers of an entry's id."""
        time, _, number = id.partition("-")
        if not (time.isdecimal() and number.isdecimal()):
            raise HistoryLost("the event id is not one of a Redis stream")
        return int(time), int(number)

    async def read(
        self, after: Position, tenant: str, channels: frozenset[str], limit: int
    ) -> list[SourceEvent]:
        """Return entries of the tenant after a position."""
        if not await self._has(after):
            raise HistoryLost("the history does not reach back to the event id")
        found: list[SourceEvent] = []
        while len(found) < limit:
            page = await self._client.xrange(self._key, min=f"({_text(after)}", count=BATCH)
            events = [_event(id, fields) for id, fields in page or ()]
            found += [each for each in events if each.channel in channels and _is_of(each, tenant)]
            if len(events) < BATCH:
                break
            after = events[-1].position
        return found[:limit]

    async def _newest(self) -> Position:
        entries = await self._client.xrevrange(self._key, count=1)
        return self.position(entries[0][0]) if entries else START

    async def _has(self, position: Position) -> bool:
        """Whether the stream has the entry, and so all after it: the oldest are removed first."""
        id = _text(position)
        return position == START or bool(await self._client.xrange(self._key, id, id))


def _entries(found: Any) -> Iterator[tuple[str, dict[str, str]]]:
    for _, entries in found or ():
        yield from entries


def _is_of(event: SourceEvent, tenant: str) -> bool:
    """Whether the event may be of the tenant: the broker checks the payload of those without."""
    return event.tenant is None or event.tenant == tenant


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _event(id: str, fields: dict[str, str]) -> SourceEvent:
    time, _, number = id.partition("-")
    position = int(time), int(number)
    return SourceEvent(
        fields.get("channel", ""), fields.get("payload", ""), fields.get("tenant"), id, position
    )
