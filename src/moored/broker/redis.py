"""Events through Redis Streams, for fleets whose nodes must not all read one database.

::

    events = RedisEvents("redis://127.0.0.1")
    broker = Broker(events, channels=["orders"])
    await events.publish("orders", payload, tenant=org_id)

An id is that of the stream's entry, so a client may resume at any node. Needs `moored[redis]`.
"""

from __future__ import annotations

import asyncio
import secrets
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
#: The entries that the server reads for a replay at most before it answers other clients.
LOOK = 1_000
#: Seconds for the answer to a command, which may have waited.
TIMEOUT = 10.0
#: The largest number of an entry's id.
LARGEST = 2**64 - 1
Position = tuple[Any, ...]
START: Position = (0, 0)

# A second key has the id of the last entry of each tenant, and each entry that of the one before of
# its tenant, so that a replay reads what its tenant has. `since` is the id after which this is
# complete, and `newest` the last entry that it knows: another one was added in another way. `life`
# is a random name: an id from before the first entry is not valid for a stream that was lost since.
_PUBLISH = """
local stream, index = KEYS[1], KEYS[2]
local id, keep, tenant = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local newest = redis.call('HGET', index, 'newest')
if not newest or redis.call('XRANGE', stream, '(' .. newest, '+', 'COUNT', 1)[1] then
    local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    if newest then redis.call('DEL', index) end
    redis.call('HSET', index, 'since', last and last[1] or '0-0')
end
local fields = {unpack(ARGV, 4)}
fields[#fields + 1] = 'before'
fields[#fields + 1] = redis.call('HGET', index, tenant) or ''
id = redis.call('XADD', stream, 'MAXLEN', '~', keep, id, unpack(fields))
redis.call('HSET', index, 'newest', id, tenant, id)
if tenant == 'gap' or redis.call('HLEN', index) > keep + 4 then
    redis.call('DEL', index)
    redis.call('HSET', index, 'since', id, 'newest', id)
end
return id
"""

# Entries after an id that are of a tenant, or name their tenant in the payload; nil if some are
# missing. Without knowledge of the tenant's last entries, those of all tenants are looked through.
_REPLAY = """
local stream, index = KEYS[1], KEYS[2]
local after, tenant, limit, look = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local function larger(one, other)
    if #one ~= #other then return #one > #other end
    return one > other
end
local function newer(one, other)
    local time, number = string.match(one, '(%d+)-(%d+)')
    local other_time, other_number = string.match(other, '(%d+)-(%d+)')
    if time ~= other_time then return larger(time, other_time) end
    return larger(number, other_number)
end
local function by_name(flat)
    local found = {}
    for at = 1, #flat, 2 do found[flat[at]] = flat[at + 1] end
    return found
end
local function from_index()
    local newest, since, own, shared =
        unpack(redis.call('HMGET', index, 'newest', 'since', 'of ' .. tenant, 'all'))
    if not newest or newer(since, after) or (shared and newer(shared, after)) then return end
    if redis.call('XRANGE', stream, '(' .. newest, '+', 'COUNT', 1)[1] then return end
    local found = {}
    while own and own ~= '' and newer(own, after) do
        local entry = redis.call('XRANGE', stream, own, own)[1]
        if not entry or #found == look / 2 then return end
        table.insert(found, entry)
        own = by_name(entry[2]).before
    end
    local page = {}
    for at = #found, math.max(1, #found - limit + 1), -1 do table.insert(page, found[at]) end
    return {#page > 0 and page[#page][1] or after, page}
end
if after ~= '0-0' then
    if not redis.call('XRANGE', stream, after, after)[1] then return false end
elseif redis.call('EXISTS', stream) == 1 then
    local state = by_name(redis.call('XINFO', 'STREAM', stream))
    if state['entries-added'] ~= state.length then return false end
end
if after == '0-0' and redis.call('HGET', index, 'life') ~= ARGV[5] then return false end
local answer = from_index()
if answer then return answer end
local found, last = {}, after
for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. after, '+', 'COUNT', look)) do
    local fields, own = entry[2], true
    for at = 1, #fields, 2 do
        if fields[at] == 'gap' then return false end
        if fields[at] == 'tenant' then own = fields[at + 1] == tenant end
    end
    last = entry[1]
    if own then found[#found + 1] = entry end
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
        # In a cluster, both keys are in one slot.
        self._keys = [key, f"{key}:tenants" if "{" in key else f"{{{key}}}:tenants"]
        self._replay: Any = self._client.register_script(_REPLAY)
        self._publish: Any = self._client.register_script(_PUBLISH)

    async def publish(self, channel: str, payload: str, *, tenant: str | None = None) -> str:
        """Add an event, and return its id.

        Raises redis-py's `ConnectionError` if the connection was lost: the event may have been
        added or not.
        """
        return await self._add("*", channel, payload, tenant)

    async def copy(self, outbox: OutboxLike) -> None:
        """Copy the events of an outbox into the stream, without end.

        Run it in one process at a time, for example under an exclusive lease; the next one goes on
        where the last one ended, at the cursor in the key `<key>:cursor`. An entry has the order of
        the outbox as its id, so copying an event twice has no effect. If the outbox is reset, the
        stream is emptied, and the copy goes on with the events from then on: every subscriber gets
        a reset, also one that resumes later.
        """
        cursor = f"{self._key}:cursor"
        after = await self._run(self._client.get(cursor))
        async for batch in outbox.tail(after):
            at = outbox.place(batch.cursor)
            if batch.reset is not None:
                await self._run(self._client.delete(*self._keys))
                await self._copy(at, gap=batch.reset.reason)
            elif after is None:
                await self._copy(at, gap="the copy of the outbox has begun")
            for event in batch.events:
                found = event.channel, event.payload, event.tenant
                await self._copy(outbox.place(event.cursor), *found)
            await self._run(self._client.set(cursor, batch.cursor))
            after = batch.cursor

    async def _copy(self, at: int, *event: Any, gap: str = "") -> None:
        if not at:
            return  # before the first event of an outbox nothing can be missing
        id = _text(divmod(at, LARGEST + 1))
        try:
            await (self._insert(id, "gap", gap=gap) if gap else self._add(id, *event))
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise  # else another process has copied it

    async def _add(self, id: str, channel: str, payload: str, tenant: str | None) -> str:
        if tenant is None:
            return await self._insert(id, "all", channel=channel, payload=payload)
        fields = {"channel": channel, "payload": payload, "tenant": tenant}
        return await self._insert(id, f"of {tenant}", **fields)

    async def _insert(self, id: str, of: str, **fields: str) -> str:
        """Add an entry, and note in the index of whom it is."""
        flat = [each for pair in fields.items() for each in pair]
        command = self._publish(keys=self._keys, args=[id, self._keep, of, *flat])
        return str(await self._run(command))

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
            self._last, id = await self._end()
            yield SourceGap("the source has begun", id)
        while True:
            found = await self._after(self._last, BATCH)
            if found is None:
                self._last, id = await self._end()
                yield SourceGap("entries of the Redis stream were lost", id)
                continue
            yield None
            for item in found:
                self._last = self.position(item.id)
                yield item
            if not found:
                seen = {self._key: _text(self._last)}
                await self._run(self._client.xread(seen, count=1, block=BLOCK))

    # -- the history ---------------------------------------------------------------------------

    def position(self, id: str) -> Position:
        """Return the two numbers of an entry's id; before the first one, also the stream's name."""
        time, number, *life = id.split("-")
        found = int(time), int(number)
        if not all(0 <= each <= LARGEST for each in found) or len(life) != (found == START):
            raise HistoryLost("the event id is not one of a Redis stream")
        return (*found, *life)

    async def read(
        self, after: Position, tenant: str, channels: frozenset[str] | None, limit: int
    ) -> list[SourceEvent]:
        """Return entries of the tenant after a position.

        Where the server does not know which these are, it looks through all, `LOOK` at a time.
        """
        while True:
            asked = [_text(after), tenant, limit, LOOK, *after[2:]]
            answer = await self._run(self._replay(keys=self._keys, args=asked))
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

    async def _end(self) -> tuple[Position, str]:
        """Return the position of the last entry, and the id to resume after it."""
        if entries := await self._run(self._client.xrevrange(self._key, count=1)):
            return self.position(entries[0][0]), entries[0][0]
        index = self._keys[1]
        await self._run(self._client.hsetnx(index, "life", secrets.token_hex(4)))
        return START, f"{_text(START)}-{await self._run(self._client.hget(index, 'life'))}"

    async def _after(self, position: Position, count: int) -> list[SourceEvent | SourceGap] | None:
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
        return [
            SourceGap(fields["gap"], id) if "gap" in fields else _event(id, fields)
            for id, fields in entries
        ]


def _text(position: Position) -> str:
    return f"{position[0]}-{position[1]}"


def _event(id: str, fields: dict[str, str]) -> SourceEvent:
    time, _, number = id.partition("-")
    position = int(time), int(number)
    return SourceEvent(
        fields.get("channel", ""), fields.get("payload", ""), fields.get("tenant"), id, position
    )
