"""Events through a real Redis: several nodes, clients that change nodes, and lost data."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import psycopg
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.broker.fleet import Sent, roam
from tests.broker.serving import ACME, OTHER
from tests.leases.redis_server import RedisServer
from tests.servers import empty_database, require_server

from moored.broker import Broker, LiveEvent, LiveStream, StreamReset
from moored.broker.redis import RedisEvents
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres.outbox import Outbox, OutboxBatch
from moored.testing import scaled

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


@asynccontextmanager
async def node(url: str) -> AsyncIterator[Broker]:
    """A broker on the Redis stream."""
    source = RedisEvents(url)
    try:
        async with Broker(source, replay=source, channels=CHANNELS) as broker:
            yield broker
    finally:
        await source.close()


@pytest.fixture
async def publisher(server: RedisServer) -> AsyncIterator[RedisEvents]:
    """A source for an empty stream that already has an entry."""
    server.run("flushall")
    source = RedisEvents(server.url)
    await publish(source, -1)
    yield source
    await source.close()


async def test_clients_that_change_nodes_over_restarts_get_every_event_once(
    publisher: RedisEvents, server: RedisServer
) -> None:
    async def write(writer: int, count: int) -> None:
        for number in range(count):
            event = Sent(writer, number)
            await publisher.publish("orders", json.dumps(event.body), tenant=event.tenant)
            await asyncio.sleep(random.uniform(0, 0.01))

    await roam(partial(node, server.url), write, scaled(500, least=10))


async def test_clients_get_every_event_of_a_copied_outbox_once(
    publisher: RedisEvents, server: RedisServer, postgres: SyncEmbeddedPostgres
) -> None:
    """The process that copies is replaced twice, too."""
    with empty_database(postgres) as url:
        async with Outbox(url, install=True) as outbox, AsyncExitStack() as stack:

            async def replace_copier() -> None:
                await stack.aclose()
                copying = asyncio.ensure_future(publisher.copy(outbox))
                stack.push_async_callback(asyncio.wait, {copying})
                stack.callback(copying.cancel)

            async def write(writer: int, count: int) -> None:
                async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                    for number in range(count):
                        event = Sent(writer, number)
                        body, tenant = event.body, event.tenant
                        await outbox.publish(conn, "orders", body, tenant=tenant)
                        await asyncio.sleep(random.uniform(0, 0.01))

            server.run("flushall")
            await replace_copier()
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                # Something to begin after: an empty stream has no position.
                while not server.run("exists", "moored:events"):
                    await outbox.publish(conn, "orders", {"org_id": ACME}, tenant=ACME)
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            await roam(partial(node, server.url), write, scaled(500, least=10), replace_copier)


class Tailed(Outbox):
    """An outbox that reports when a batch was handled."""

    handled: asyncio.Event

    async def tail(
        self, after: str | None = None, *, channels: Sequence[str] = ()
    ) -> AsyncIterator[OutboxBatch]:
        async for batch in super().tail(after, channels=channels):
            yield batch
            self.handled.set()


async def test_copier_continues_after_one_that_had_nothing_to_copy(
    publisher: RedisEvents, server: RedisServer, postgres: SyncEmbeddedPostgres
) -> None:
    server.run("flushall")
    with empty_database(postgres) as url:
        async with (
            asyncio.timeout(60),
            Tailed(url, install=True) as outbox,
            await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
        ):
            for text in ("1", "2"):
                outbox.handled = asyncio.Event()
                copying = asyncio.ensure_future(publisher.copy(outbox))
                await outbox.handled.wait()
                copying.cancel()
                await asyncio.wait({copying})
                await outbox.publish(conn, "orders", text)
    entries = await publisher._client.xrange("moored:events")
    assert [fields["payload"] for _, fields in entries] == ["1"]


async def test_event_without_a_tenant_of_its_own_is_replayed_to_the_tenant_in_its_payload(
    nodes: tuple[RedisEvents, Broker, Broker],
) -> None:
    source, one, _ = nodes
    first = await publish(source, 1)
    for number, tenant in ((2, OTHER), (3, ACME)):
        payload = json.dumps({"org_id": tenant, "number": number})
        await source.publish("orders", payload)
    async with one.subscribe(ACME, after=first) as stream:
        assert await numbers(stream, 1) == [3]


@pytest.mark.parametrize(
    "last", ["0-0", "0-0-x", "5-5-x", "5-5", f"{2**64}-1", "-1-1", "1", "x-y", "9" * 5000]
)
async def test_odd_last_event_id_is_a_reset(
    nodes: tuple[RedisEvents, Broker, Broker], last: str
) -> None:
    _, one, _ = nodes
    async with one.subscribe(ACME, after=last) as stream, asyncio.timeout(30):
        assert isinstance(await anext(stream), StreamReset)


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
            fifth = await publish(source, 5)
            assert await numbers(stream, 1) == [5]
        async with one.subscribe(ACME, after=fifth) as live, asyncio.timeout(30):
            # The fifth may come from the history, before the source has read it.
            await publish(source, 6)
            assert await numbers(live, 1) == [6]
            while one.status()["events"] < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await client.flushall()
            async with one.subscribe(ACME, after=last) as stream:
                assert isinstance(await anext(stream), StreamReset)
            await publish(source, 7)
            found = await anext(live)
            assert isinstance(found, StreamReset), "entries before the new one were lost"
            assert found.id
