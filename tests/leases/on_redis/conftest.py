"""Stores in Redis: near, far, and on servers that a test may harm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis
from tests.leases.on_redis.support import PATIENCE, Start
from tests.leases.redis_server import RedisServer
from tests.servers import require_server

from moored.kernel import Clock
from moored.leases.redis import RedisStore
from moored.leases.redis import open_store as open_redis
from moored.testing.proxy import FaultProxy


@pytest.fixture
def start_redis() -> Iterator[Start]:
    """Starts servers that a test may harm, with options of its own."""
    servers: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        server = RedisServer(require_server("redis"), *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    opened = open_redis(redis_url, clock=Clock.current())
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", redis_server.port) as running:
        yield running


@pytest.fixture
async def far_store(proxy: FaultProxy, redis_url: str) -> AsyncIterator[RedisStore]:
    """A store behind a proxy, with little patience."""
    prefix = redis_url.partition("?")[2]
    opened = open_redis(
        f"redis://127.0.0.1:{proxy.port}?{prefix}&timeout={PATIENCE}", clock=Clock.current()
    )
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis(port=redis_server.port, decode_responses=True) as connected:
        yield connected
