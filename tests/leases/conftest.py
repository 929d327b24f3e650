"""What the tests of the leases share: real servers, one of each per worker, and silence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.leases.redis_server import RedisServer
from tests.logs import silent
from tests.servers import free_port, require_server

_numbers = itertools.count(1)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log of the leases: thousands of simulated outages are many lines."""
    with silent("moored.leases"):
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running Redis for tests that do not harm it; `redis_url` is an empty place in it."""
    with RedisServer(require_server("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty place for one test, on the server that its worker has."""
    return f"{redis_server.url}?prefix=test-{next(_numbers)}"


@pytest.fixture
def unused_port() -> int:
    """A loopback port without a listener."""
    return free_port()
