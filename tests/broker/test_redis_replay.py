"""What a replay from Redis costs and returns, and from where it is possible."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from redis.asyncio import Redis
from tests.broker.serving import ACME, OTHER
from tests.leases.redis_server import RedisServer
from tests.servers import empty_database, require_server

from moored.broker import Broker, HistoryLost, LiveEvent, StreamReset
from moored.broker import redis as broker_redis
from moored.broker.redis import RedisEvents
from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Tasks
from moored.postgres.outbox import Outbox
from moored.testing import scaled

KEY = "moored:events"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as redis:
        yield redis


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    async with Redis.from_url(server.url, decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def events(server: RedisServer, client: Any) -> AsyncIterator[RedisEvents]:
    source = RedisEvents(server.url)
    yield source
    await source.close()


async def publish(events: RedisEvents, number: int, tenant: str | None = ACME) -> str:
    payload = json.dumps({"org_id": tenant, "number": number})
    return await events.publish("orders", payload, tenant=tenant)


async def read(events: RedisEvents, after: str, tenant: str = ACME) -> list[str]:
    """Return the ids of all events after an id, read page by page."""
    found: list[str] = []
    while page := await events.read(events.position(after), tenant, None, 3):
        found += [event.id for event in page]
        after = found[-1]
    return found


async def test_replay_of_a_quiet_tenant_does_not_depend_on_the_entries_of_others(
    events: RedisEvents, client: Any
) -> None:
    async def took(after: str) -> int:
        """The microseconds of the server, the shortest of some."""
        found = []
        for _ in range(5):
            before = (await client.info("commandstats"))["cmdstat_evalsha"]["usec"]
            await read(events, after)
            now = (await client.info("commandstats"))["cmdstat_evalsha"]["usec"]
            found.append(int(now - before))
        return min(found)

    first = await publish(events, 1)
    await publish(events, 2, OTHER)
    alone = await took(first)
    for _ in range(max(20, scaled(900))):
        await asyncio.gather(*(publish(events, 3, OTHER) for _ in range(100)))
    assert await took(first) < 10 * alone + 200
    own = await publish(events, 4)
    assert await read(events, first) == [own]


async def test_replay_returns_what_the_tenant_has_however_entries_were_added(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_redis, "LOOK", 8)
    for _ in range(scaled(100, least=10)):
        await client.flushall()
        events = RedisEvents(server.url, keep=random.choice([2, 100_000]))
        kept = list[tuple[str, str | None]]()
        for number in range(random.randrange(40)):
            tenant = random.choice([ACME, ACME, OTHER, OTHER, OTHER, OTHER, "all", None])
            if random.random() < 0.1:  # by another program, or an older version
                fields = {"channel": "orders", "payload": "{}"} | (
                    {"tenant": tenant} if tenant else {}
                )
                id = await client.xadd(KEY, fields)
            else:
                id = await publish(events, number, tenant)
            kept.append((id, tenant))
            if random.random() < 0.05:
                await client.xtrim(KEY, maxlen=5, approximate=False)
            kept = kept[-await client.xlen(KEY) :]
        for at, (after, _) in enumerate(kept):
            for asked in (ACME, OTHER, "all"):
                expected = [id for id, tenant in kept[at + 1 :] if tenant in (asked, None)]
                assert await read(events, after, asked) == expected
        await events.close()


async def test_client_that_came_before_the_first_event_resumes_at_the_beginning(
    events: RedisEvents, client: Any
) -> None:
    async with Broker(events) as broker:
        async with broker.subscribe(ACME) as stream:
            start = stream.start
        await publish(events, 1)
        async with broker.subscribe(ACME, after=start) as stream, asyncio.timeout(30):
            found = await anext(stream)
            assert isinstance(found, LiveEvent)
    await publish(events, 2)
    assert len(await read(events, start)) == 2
    await client.xtrim(KEY, maxlen=1, approximate=False)
    with pytest.raises(HistoryLost):
        await read(events, start)


async def test_id_from_before_the_first_event_is_not_valid_for_another_stream(
    events: RedisEvents, client: Any, server: RedisServer
) -> None:
    async with Broker(events) as broker, broker.subscribe(ACME) as stream:
        await publish(events, 1)
        await client.flushall()
        assert isinstance(await anext(stream), LiveEvent | StreamReset)
    restarted = RedisEvents(server.url)
    async with Broker(restarted) as broker, asyncio.timeout(30):
        async with broker.subscribe(ACME, after=stream.start) as again:
            assert isinstance(await anext(again), StreamReset)
        async with broker.subscribe(ACME, after=again.id) as later:
            await publish(events, 2)
            assert isinstance(await anext(later), LiveEvent)
    await restarted.close()


@pytest.mark.parametrize("cursor", ["", "1-1-3-0"], ids=["the first time", "after a reset"])
async def test_events_that_were_not_copied_are_a_reset_for_all(
    events: RedisEvents, client: Any, postgres: SyncEmbeddedPostgres, cursor: str
) -> None:
    if cursor:
        await client.set(f"{KEY}:cursor", cursor)
    tasks = Tasks()
    with empty_database(postgres) as url:
        async with (
            asyncio.timeout(60),
            Outbox(url, install=True) as outbox,
            await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
            Broker(events) as broker,
            broker.subscribe(ACME) as live,
        ):
            await outbox.publish(conn, "orders", "{}", tenant=ACME)
            tasks.start(events.copy(outbox))
            found = await anext(live)
            assert isinstance(found, StreamReset)
            async with broker.subscribe(ACME, after=live.start) as late:
                assert isinstance(await anext(late), StreamReset)
            await outbox.publish(conn, "orders", "{}", tenant=ACME)
            async with broker.subscribe(ACME, after=found.id) as now:
                assert isinstance(await anext(now), LiveEvent)
            await tasks.cancel()
