"""The store in Redis, against a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from tests.leases.conformance import OpenStore, StoreConformance, opening, request
from tests.leases.on_redis.support import names, prefix_of

from moored.kernel import Clock
from moored.leases.redis import RedisStore
from moored.leases.redis import open_store as open_redis
from moored.testing.proxy import FaultProxy


class TestRedis(StoreConformance):
    @pytest.fixture
    async def open_store(self, redis_url: str) -> AsyncIterator[OpenStore]:
        async with opening(lambda: open_redis(redis_url, clock=Clock.current())) as open_store:
            yield open_store


async def test_every_redis_key_expires(store: RedisStore, client: Redis) -> None:
    await store.acquire(request("db", ttl=5.0))
    await store.take("db", rate=10.0, burst=5, tokens=1)
    expiries = {name: await client.pttl(name) for name in await names(client, store)}
    prefix = prefix_of(store)
    assert set(expiries) == {f"{prefix}:{{db}}:{part}" for part in ("live", "who", "fence", "rate")}
    # A minute after the last lease has expired; a fence stays for a week.
    week = 7 * 24 * 3600 * 1000
    assert week - 60_000 < expiries.pop(f"{prefix}:{{db}}:fence") <= week
    assert all(50_000 < left <= 66_000 for left in expiries.values())


async def test_a_renewal_extends_the_expiry_of_the_redis_keys(
    store: RedisStore, client: Redis
) -> None:
    wanted = request("db", ttl=10.0)
    await store.acquire(wanted)
    await store.renew([replace(wanted, ttl=500.0)])
    for part in ("live", "who"):
        assert await client.pttl(f"{prefix_of(store)}:{{db}}:{part}") > 500_000


async def test_a_released_lease_leaves_only_its_fence(store: RedisStore, client: Redis) -> None:
    wanted = request("db")
    await store.acquire(wanted)
    await store.release([wanted])
    assert await names(client, store) == {f"{prefix_of(store)}:{{db}}:fence"}


async def test_expired_leases_of_a_key_are_deleted_by_the_next_call(
    store: RedisStore, client: Redis
) -> None:
    for _ in range(3):
        await store.acquire(request("db", limit=5, ttl=0.05))
    await asyncio.sleep(0.1)
    await store.acquire(request("db", limit=5))
    assert await client.zcard(f"{prefix_of(store)}:{{db}}:live") == 1
    assert await client.hlen(f"{prefix_of(store)}:{{db}}:who") == 1


async def test_scripts_that_the_server_lost_are_sent_again(
    store: RedisStore, client: Redis
) -> None:
    wanted = [request(f"db/{n}") for n in range(5)]
    for each in wanted:
        await store.acquire(each)
    await client.script_flush()
    assert list(await store.renew(wanted)) == [True] * 5
    await client.script_flush()
    assert len(await store.held()) == 5


async def test_renewals_of_many_keys_take_one_round_trip(
    store: RedisStore, far_store: RedisStore, proxy: FaultProxy
) -> None:
    wanted = [request(f"db/{n}") for n in range(50)]
    await asyncio.gather(*map(store.acquire, wanted))
    proxy.latency(0.05)
    # Fifty round trips of 0.1 s would not be over within the time that a call may take.
    assert list(await far_store.renew(wanted)) == [True] * 50


async def test_a_clock_that_was_set_back_does_not_block_a_rate_limit(
    store: RedisStore, client: Redis
) -> None:
    await store.take("connects", rate=2.0, burst=4, tokens=4)
    name = f"{prefix_of(store)}:{{connects}}:rate"
    # An hour ahead is what an hour back looks like.
    await client.incrby(name, 3600 * 1_000_000)
    granted, wait = await store.take("connects", rate=2.0, burst=4, tokens=4)
    assert granted == 0
    assert 0 < wait <= 0.5
    await asyncio.sleep(wait)
    assert (await store.take("connects", rate=2.0, burst=4, tokens=4)).granted >= 1


async def test_a_clock_that_was_set_back_does_not_prolong_a_lease(
    store: RedisStore, client: Redis
) -> None:
    wanted = request("db", ttl=0.2)
    await store.acquire(wanted)
    name = f"{prefix_of(store)}:{{db}}:live"
    await client.zincrby(name, 3600 * 1_000_000, wanted.id)
    assert await store.acquire(request("db", ttl=0.2)) is None
    await asyncio.sleep(0.25)
    assert await store.acquire(request("db", ttl=0.2)) is not None


async def test_a_refused_acquire_with_a_shorter_ttl_changes_no_lease(store: RedisStore) -> None:
    await store.acquire(request("db", ttl=100.0))
    for _ in range(2):
        assert await store.acquire(request("db", ttl=0.1)) is None
    (held,) = await store.held("db")
    assert held.expires_in > 90


async def test_the_fence_grows_when_the_last_one_is_lost(store: RedisStore, client: Redis) -> None:
    first = await store.acquire(request("db", limit=2))
    await client.delete(f"{prefix_of(store)}:{{db}}:fence")
    second = await store.acquire(request("db", limit=2))
    assert first is not None
    assert second is not None
    assert second.fence > first.fence


async def test_the_fence_grows_when_the_clock_was_set_back(
    store: RedisStore, client: Redis
) -> None:
    first = await store.acquire(request("db", limit=2))
    ahead = await client.incrby(f"{prefix_of(store)}:{{db}}:fence", 3600 * 1_000_000)
    second = await store.acquire(request("db", limit=2))
    assert first is not None
    assert second is not None
    assert second.fence == ahead + 1 > first.fence


@pytest.mark.parametrize("rate", [0.3, 3.0, 7.7, 300.0, 999.0, 30_000.0])
async def test_a_full_limit_gives_exactly_its_burst(store: RedisStore, rate: float) -> None:
    # Costs are not whole microseconds here: rounding must neither give a token nor keep one.
    assert (await store.take("odd", rate=rate, burst=7, tokens=1000)).granted == 7
    granted, wait = await store.take("odd", rate=rate, burst=7, tokens=1)
    assert granted == 1 or 0 < wait <= 1 / rate + 1e-6


async def test_a_smaller_limit_starts_empty(store: RedisStore) -> None:
    await store.take("connects", rate=1.0, burst=100, tokens=100)
    granted, wait = await store.take("connects", rate=10.0, burst=2, tokens=1)
    assert granted == 0
    assert 0 < wait <= 0.1
