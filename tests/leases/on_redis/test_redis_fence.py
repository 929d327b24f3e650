"""Fenced writes to Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis
from redis.asyncio import Redis
from redis.crc import key_slot
from tests.leases.redis_server import RedisServer

from moored.leases import FenceRejected, LeaseLost, StoreMisconfigured, StoreUnavailable
from moored.leases._redis._fence import _fence_key
from moored.leases.redis import fenced, fenced_set, fenced_set_sync, fenced_sync


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis(port=redis_server.port, decode_responses=True) as connected:
        await connected.flushdb()
        yield connected


async def test_the_newest_owner_may_write(client: Redis) -> None:
    await fenced_set(client, "report", "first", 5)
    await fenced_set(client, "report", "again", 5)
    await fenced_set(client, "report", "second", 6)
    assert await client.get("report") == "second"


async def test_an_old_owner_is_rejected(client: Redis) -> None:
    await fenced_set(client, "report", "new", 1_763_000_000_000_002)
    with pytest.raises(FenceRejected) as caught:
        await fenced_set(client, "report", "old", 1_763_000_000_000_001)
    assert await client.get("report") == "new"
    error = caught.value
    assert isinstance(error, LeaseLost)
    assert (error.resource, error.fence, error.seen) == (
        "report",
        1_763_000_000_000_001,
        1_763_000_000_000_002,
    )


async def test_resources_have_fences_of_their_own(client: Redis) -> None:
    await fenced_set(client, "a", "x", 9)
    await fenced_set(client, "b", "y", 3)
    assert await client.mget("a", "b") == ["x", "y"]


async def test_fenced_runs_any_command_and_returns_its_result(client: Redis) -> None:
    assert await fenced(client, "log", 5, "RPUSH", "log", "a", "b") == 2
    assert await fenced(client, "log", 5, "LPOP", "nothing") is None
    with pytest.raises(FenceRejected):
        await fenced(client, "log", 4, "RPUSH", "log", "c")
    assert await client.lrange("log", 0, -1) == ["a", "b"]


async def test_fenced_set_applies_the_ttl(client: Redis) -> None:
    await fenced_set(client, "report", "soon gone", 5, ttl=100.0)
    assert 99_000 < await client.pttl("report") <= 100_000
    # The fence stays: an old owner must not come back with the end of the value.
    assert await client.pttl(_fence_key("report")) == -1


async def test_a_failed_command_raises(client: Redis) -> None:
    await client.set("report", "text")
    with pytest.raises(StoreMisconfigured):
        await fenced(client, "report", 5, "RPUSH", "report", "x")
    with pytest.raises(ValueError, match="must be a command with a key"):
        await fenced(client, "report", 5, "PING")


async def test_a_fenced_write_without_a_server_raises_store_unavailable(unused_port: int) -> None:
    async with Redis(port=unused_port) as nobody:
        with pytest.raises(StoreUnavailable):
            await fenced_set(nobody, "report", "x", 5)


def test_fenced_sync_works_without_asyncio(redis_server: RedisServer) -> None:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushdb()
        fenced_set_sync(client, "report", "new", 6)
        assert fenced_sync(client, "report", 6, "APPEND", "report", "er") == 5
        with pytest.raises(FenceRejected):
            fenced_set_sync(client, "report", "old", 5)
        assert client.get("report") == "newer"


@pytest.mark.parametrize("resource", ["report", "{shop}:report", "a{b}c", "open{"])
def test_the_fence_is_in_the_hash_slot_of_its_resource(resource: str) -> None:
    assert key_slot(_fence_key(resource).encode()) == key_slot(resource.encode())
