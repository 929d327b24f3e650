"""Events through a real Redis: several nodes, clients that change nodes, and lost data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import psycopg
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.broker.serving import ACME, OTHER
from tests.leases.redis_server import RedisServer
from tests.servers import empty_database, require_server

from moored.broker import Broker, LiveEvent, LiveStream, StreamReset
from moored.broker.redis import RedisEvents
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Outbox

CHANNELS = ["orders"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as redis:
        yield redis


@pytest.fixture
async def nodes(server: RedisServer) -> AsyncIterator[tuple[RedisEvents, Broker, Broker]]:
    """A publisher, and the brokers of two nodes."""
    async with AsyncExitStack() as stack:
        async with Redis.from_url(server.url) as client:
            await client.flushall()
        sources = [RedisEvents(server.url, keep=1000) for _ in range(3)]
        for source in sources:
            stack.push_async_callback(source.close)
        brokers = [
            await stack.enter_async_context(Broker(source, replay=source, channels=CHANNELS))
            for source in sources[:2]
        ]
        yield sources[2], brokers[0], brokers[1]


async def publish(source: RedisEvents, number: int, tenant: str = ACME) -> str:
    payload = json.dumps({"org_id": tenant, "number": number})
    return await source.publish("orders", payload, tenant=tenant)


async def numbers(stream: LiveStream, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(30):
        async for item in stream:
            assert isinstance(item, LiveEvent), item
            found.append(json.loads(item.payload)["number"])
            if len(found) == count:
                break
    return found


async def following(broker: Broker, source: RedisEvents) -> None:
    """Wait until a broker reads the stream: a new one begins with the entries after its start."""
    async with broker.subscribe(OTHER) as stream, asyncio.timeout(30):
        while not len(stream.subscriber):
            await publish(source, 0, OTHER)
            await asyncio.sleep(0.02)


async def test_every_node_gets_every_event_and_a_client_may_change_nodes(
    nodes: tuple[RedisEvents, Broker, Broker],
) -> None:
    source, one, two = nodes
    for broker in (one, two):
        await following(broker, source)
    async with one.subscribe(ACME) as first, two.subscribe(ACME) as second:
        ids = [await publish(source, number) for number in range(1, 4)]
        assert await numbers(first, 3) == await numbers(second, 3) == [1, 2, 3]
    await publish(source, 4)
    async with two.subscribe(ACME, after=ids[0]) as moved:
        assert await numbers(moved, 3) == [2, 3, 4]
        await publish(source, 5)
        assert await numbers(moved, 1) == [5]


async def test_events_continue_after_redis_was_killed_and_started_again(
    nodes: tuple[RedisEvents, Broker, Broker], server: RedisServer
) -> None:
    source, one, _ = nodes
    await following(one, source)
    async with one.subscribe(ACME) as stream:
        await publish(source, 1)
        assert await numbers(stream, 1) == [1]
        server.kill()
        server.start()
        with pytest.raises(RedisConnectionError):
            await publish(source, 2)  # on the connection to the killed server
        await publish(source, 2)
        assert await numbers(stream, 1) == [2]


async def test_trimmed_history_and_lost_data_are_resets(
    nodes: tuple[RedisEvents, Broker, Broker], server: RedisServer
) -> None:
    source, one, _ = nodes
    old = await publish(source, 1)
    async with Redis.from_url(server.url) as client:
        last = [await publish(source, number) for number in range(2, 5)][-1]
        await client.xtrim("moored:events", maxlen=1, approximate=False)
        async with one.subscribe(ACME, after=old) as stream, asyncio.timeout(30):
            assert isinstance(await anext(stream), StreamReset)
        async with one.subscribe(ACME, after=last) as stream:
            await publish(source, 5)
            assert await numbers(stream, 1) == [5]
        await client.flushall()
        async with one.subscribe(ACME, after=last) as stream, asyncio.timeout(30):
            assert isinstance(await anext(stream), StreamReset)


async def test_copied_outbox_reaches_every_node_over_restarts_of_the_copying(
    nodes: tuple[RedisEvents, Broker, Broker], postgres: SyncEmbeddedPostgres
) -> None:
    source, one, two = nodes
    with empty_database(postgres) as url:
        async with Outbox(url, install=True) as outbox:
            await outbox.install()
            async with (
                one.subscribe(ACME) as first,
                two.subscribe(ACME) as second,
                await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
            ):
                for life in range(3):
                    copying = asyncio.ensure_future(source.copy(outbox))
                    await asyncio.sleep(0.2)
                    for number in range(2):
                        body = {"org_id": ACME, "number": 2 * life + number}
                        await outbox.publish(conn, "orders", body, tenant=ACME)
                    assert await numbers(first, 2) == [2 * life, 2 * life + 1]
                    copying.cancel()
                    await asyncio.wait({copying})
                assert await numbers(second, 6) == list(range(6))
