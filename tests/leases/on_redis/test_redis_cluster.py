"""The store in a Redis Cluster of three nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
from redis.asyncio import RedisCluster
from tests.leases.conformance import ODD_KEYS, request
from tests.leases.redis_server import START_LIMIT, RedisServer
from tests.servers import free_port, require_server

from moored.kernel import Clock
from moored.leases import FenceRejected, StoreMisconfigured
from moored.leases.redis import RedisStore, fenced_set
from moored.leases.redis import open_store as open_redis

SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RedisServer]]:
    binary = require_server("redis")
    with ExitStack() as stack:
        running = [_started(stack, binary) for _ in SLOTS]
        for node, (first, last) in zip(running, SLOTS, strict=True):
            node.run("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.run("CLUSTER", "MEET", "127.0.0.1", running[0].port, _bus(running[0]))
        deadline = time.monotonic() + START_LIMIT
        while not all(_agrees(node) for node in running):
            assert time.monotonic() < deadline, "the nodes do not find together"
            time.sleep(0.1)
        yield running


def _started(stack: ExitStack, binary: str) -> RedisServer:
    node = RedisServer(binary)
    # The default is the port plus 10000, which another process may use.
    node.options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    return stack.enter_context(node)


def _bus(node: RedisServer) -> int:
    return int(node.options[-1])


def _agrees(node: RedisServer) -> bool:
    state = str(node.run("CLUSTER", "INFO"))
    return all(word in state for word in ("cluster_state:ok", "cluster_known_nodes:3"))


@pytest.fixture
async def stores(nodes: list[RedisServer]) -> AsyncIterator[list[RedisStore]]:
    """Two clients of the cluster, by different nodes."""
    opened = [open_redis(f"{n.url}?cluster=yes", clock=Clock.current()) for n in nodes[:2]]
    for store in opened:
        await store.open()
    yield opened
    for store in opened:
        await store.close()


async def test_keys_on_all_nodes_of_a_cluster_work(stores: list[RedisStore]) -> None:
    wanted = [request(key) for key in (*ODD_KEYS, *(f"db/{n}" for n in range(50)))]
    grants = await asyncio.gather(*map(stores[0].acquire, wanted))
    assert None not in grants
    assert {held.key for held in await stores[1].held()} == {each.key for each in wanted}
    assert list(await stores[1].renew(wanted)) == [True] * len(wanted)
    assert list(await stores[1].release(wanted)) == [True] * len(wanted)
    assert list(await stores[0].held()) == []


async def test_the_limit_holds_in_a_cluster(stores: list[RedisStore]) -> None:
    asked = [stores[n % 2].acquire(request("limited", limit=10)) for n in range(20)]
    assert sum(grant is not None for grant in await asyncio.gather(*asked)) == 10
    taken = [stores[n % 2].take("connects", rate=0.01, burst=5, tokens=1) for n in range(10)]
    assert sum(each.granted for each in await asyncio.gather(*taken)) == 5
    leases = await stores[0].held("limited")
    await stores[0].release([request("limited", known=held.id) for held in leases])


async def test_a_cluster_without_cluster_yes_is_misconfigured(nodes: list[RedisServer]) -> None:
    store = open_redis(nodes[0].url, clock=Clock.current())
    wanted = [request(f"db/{n}") for n in range(50)]
    with pytest.raises(StoreMisconfigured, match="cluster=yes"):
        await store.release(wanted)
    await store.close()


async def test_cluster_yes_without_a_cluster_is_misconfigured(redis_url: str) -> None:
    store = open_redis(f"{redis_url}&cluster=yes", clock=Clock.current())
    with pytest.raises(StoreMisconfigured, match="not a Redis Cluster"):
        await store.open()
    await store.close()


async def test_a_fenced_write_works_in_a_cluster(nodes: list[RedisServer]) -> None:
    async with RedisCluster("127.0.0.1", nodes[0].port, decode_responses=True) as client:
        for n in range(10):
            await fenced_set(client, f"report/{n}", "new", 6)
            with pytest.raises(FenceRejected):
                await fenced_set(client, f"report/{n}", "old", 5)
            assert await client.get(f"report/{n}") == "new"
