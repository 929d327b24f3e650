"""The store in Postgres behind PgBouncer, which gives each transaction another connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.leases.conformance import request
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import require_server

from moored.kernel import Clock
from moored.leases.postgres import PostgresStore
from moored.leases.postgres import open_store as open_postgres


@pytest.fixture
def bouncer_url(postgres_url: str) -> Iterator[str]:
    with pgbouncer(require_server("pgbouncer"), postgres_url) as url:
        yield url


@pytest.fixture
async def stores(bouncer_url: str) -> AsyncIterator[list[PostgresStore]]:
    """More connections than PgBouncer has to the server."""
    opened = [open_postgres(bouncer_url, clock=Clock.current()) for _ in range(4)]
    yield opened
    for store in opened:
        await store.close()


async def test_the_limit_holds(stores: list[PostgresStore]) -> None:
    await asyncio.gather(*(store.open() for store in stores))
    asked = [stores[n % 4].acquire(request(limit=10)) for n in range(20)]
    assert sum(grant is not None for grant in await asyncio.gather(*asked)) == 10


async def test_all_calls_work_through_any_pooled_connection(stores: list[PostgresStore]) -> None:
    for turn in range(20):
        wanted = [request(f"db/{n}", limit=3) for n in range(3)]
        for n, each in enumerate(wanted):
            assert await stores[(turn + n) % 4].acquire(each) is not None
        assert list(await stores[turn % 4].renew(wanted)) == [True] * 3
        assert len(await stores[turn % 4].held()) == 3
        assert (await stores[turn % 4].take("t", rate=0.01, burst=99, tokens=2)).granted == 2
        assert list(await stores[turn % 4].release(wanted)) == [True] * 3
