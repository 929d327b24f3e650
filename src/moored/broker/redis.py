"""Events through Redis Streams, for fleets whose nodes must not all read one database.

::

    events = RedisEvents("redis://127.0.0.1")
    broker = Broker(events, channels=["orders"])
    await events.publish("orders", payload, tenant=org_id)

An id is that of the stream's entry, so a client may resume at any node. Needs `moored[redis]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
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
#: The entries that the server looks through for a replay before it answers other clients.
LOOK = 1_000
#: Seconds for the answer to a command, which may have waited.
TIMEOUT = 10.0
#: The largest number of an entry's id.
LARGEST = 2**64 - 1
Position = tuple[int, int]
START: Position = (0, 0)

# Entries after an id that are of a tenant, or name their tenant in the payload. A client that was
# away for 90,000 entries of others would otherwise have all of them sent here.
_REPLAY = """
local after, tenant, limit, look = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local entries = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', look + 1)
local first = 1
if after ~= '0-0' then
    if not entries[1] or entries[1][1] ~= after then return false end
    first = 2
end
local found, last = {}, after
for at = first, #entries do
    local fields, own = entries[at][2], true
    for name = 1, #fields, 2 do
        if fields[name] == 'tenant' then own = fields[name + 1] == tenant end
    end
    last = entries[at][1]
    if own then found[#found + 1] = entries[at] end
    if #found == limit then break end
end
return {last, found}
"""


class RedisEvents:
    """A Redis stream as the source of a broker, and as its history.

    :param url: `redis://`, `rediss://` or `unix://`.
    :param key: the key of the stream.
    :param keep: about how many events the history keeps.
    """

    def __init__(self, url: str, *, key: str = "moored:events", keep: int = 100_000) -> None:
        SECRETS.add_from(url)
        # Without socket_timeout: before Python 3.12, redis-py may swallow a cancellation with it.
        self._client: Any = Redis.from_url(
            url, decode_responses=True, socket_timeout=None, socket_connect_timeout=5
        )
        self._key = key
        self._keep = keep
        self._last: Position | None = None
        self._replay: Any = self._client.register_script(_REPLAY)

    async def publish(self, channel: str, payload: str, *, tenant: str | None = None) -> str:
        """Add an event, and return its id.

        Raises redis-py's `ConnectionError` if the connection was lost: the event may have been
        added or not.
        """
        fields = {"channel": channel, "payload": payload}
        if tenant is not None:
            fields["tenant"] = tenant
        return str(await self._add(fields))

    async def copy(self, outbox: OutboxLike) -> None:
        """Copy the events of an outbox into the stream, without end.

        Run it in one process at a time, for example under an exclusive lease; the next one goes on
        where the last one ended, at the cursor in the key `<key>:cursor`. An entry has the order of
        the outbox as its id, so copying an event twice has no effect. If the outbox is reset, the
        stream is emptied.
        """
        cursor = f"{self._key}:cursor"
        async for batch in outbox.tail(await self._run(self._client.get(cursor))):
            if batch.reset is not None:
                await self._run(self._client.delete(self._key))
            for event in batch.events:
                fields = {"channel": event.channel, "payload": event.payload}
                if event.tenant is not None:
                    fields["tenant"] = event.tenant
                await self._copy(_text(divmod(outbox.place(event.cursor), LARGEST + 1)), fields)
            await self._run(self._client.set(cursor, batch.cursor))

    async def _copy(self, id: str, fields: dict[str, str]) -> None:
        try:
            await self._add(fields, id)
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise  # else another process has copied it

    async def _add(self, fields: dict[str, str], id: str = "*") -> Any:
        command = self._client.xadd(self._key, fields, id, maxlen=self._keep, approximate=True)
        return await self._run(command)

    async def _run(self, command: Awaitable[Any]) -> Any:
        """Return the answer to a command; raises `TimeoutError` if the server has vanished."""
        async with asyncio.timeout(TIMEOUT):
            return await command

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    # -- the source ----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap | None]:
        """Yield new entries; after an error, from the last one on."""
        if self._last is None:
            self._last = await self._newest()
            yield SourceGap("the source has begun", _text(self._last))
        while True:
            found = await self._after(self._last, BATCH)
            if found is None:
                self._last = await self._newest()
                yield SourceGap("entries of the Redis stream were lost", _text(self._last))
                continue
            yield None
            for event in found:
                self._last = event.position
                yield event
            if not found:
                seen = {self._key: _text(self._last)}
                await self._run(self._client.xread(seen, count=1, block=BLOCK))

    # -- the history ---------------------------------------------------------------------------

    def position(self, id: str) -> Position:
        """Return the two numbers of an entry's id."""
        time, _, number = id.partition("-")
        found = int(time), int(number)
        if found == START or not all(0 <= each <= LARGEST for each in found):
            raise HistoryLost("the event id is not one of a Redis stream")
        return found

    async def read(
        self, after: Position, tenant: str, channels: frozenset[str] | None, limit: int
    ) -> list[SourceEvent]:
        """Return entries of the tenant after a position.

        The server leaves out the other tenants' entries, `LOOK` at a time.
        """
        while True:
            asked = [_text(after), tenant, limit, LOOK]
            answer = await self._run(self._replay(keys=[self._key], args=asked))
            if answer is None:
                raise HistoryLost("the history does not reach back to the event id")
            last, entries = answer
            events = [
                _event(id, dict(zip(each[::2], each[1::2], strict=True))) for id, each in entries
            ]
            found = [each for each in events if channels is None or each.channel in channels]
            if found or last == asked[0]:
                return found
            after = self.position(last)

    async def _newest(self) -> Position:
        entries = await self._run(self._client.xrevrange(self._key, count=1))
        return self.position(entries[0][0]) if entries else START

    async def _after(self, position: Position, count: int) -> list[SourceEvent] | None:
        """Return entries after a position; None if the entry there is gone.

        The oldest entries are removed first: if the one at the position exists, so do all later
        ones.
        """
        id = _text(position)
        entries = await self._run(self._client.xrange(self._key, min=id, count=count + 1))
        if position != START:
            if not entries or entries[0][0] != id:
                return None
            del entries[0]
        return [_event(*entry) for entry in entries]


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _event(id: str, fields: dict[str, str]) -> SourceEvent:
    time, _, number = id.partition("-")
    position = int(time), int(number)
    return SourceEvent(
        fields.get("channel", ""), fields.get("payload", ""), fields.get("tenant"), id, position
    )
