"""What the tests of the store in Redis share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from tests.leases.conformance import request
from tests.leases.redis_server import RedisServer

from moored.kernel import Clock
from moored.leases import LeaseError
from moored.leases.redis import RedisStore
from moored.leases.redis import open_store as open_redis

Start = Callable[..., RedisServer]

#: Seconds that a call of a far store may take; a busy machine may stop everything for two.
PATIENCE = 3.0


def prefix_of(store: RedisStore) -> str:
    return store._link.config.prefix


async def names(client: Redis, store: RedisStore) -> set[str]:
    return {name async for name in client.scan_iter(f"{prefix_of(store)}:*")}


async def refusal(url: str) -> LeaseError:
    opened = open_redis(url, clock=Clock.current())
    try:
        with pytest.raises(LeaseError) as caught:
            await opened.acquire(request())
        return caught.value
    finally:
        await opened.close()
