"""Behind PgBouncer in transaction mode, with the settings of the how-to page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import require_server

from moored.reservoir import AsyncConnectionPool

ROUNDS = 30


@pytest.fixture
def bouncer_url(postgres_url: str) -> Iterator[str]:
    with pgbouncer(require_server("pgbouncer"), postgres_url, pool_size=2) as url:
        yield url


async def errors_of(
    pool: AsyncConnectionPool[Any], ask: Callable[[Any, int], Awaitable[object]]
) -> list[Exception]:
    """Let several callers ask at once, on more connections than PgBouncer has to the server."""
    errors: list[Exception] = []

    async def caller() -> None:
        for number in range(ROUNDS):
            try:
                async with pool.connection() as conn:
                    await ask(conn, number)
            except Exception as error:
                errors.append(error)

    await asyncio.gather(*(caller() for _ in range(4)))
    return errors


async def ask_psycopg(conn: psycopg.AsyncConnection, number: int) -> None:
    cursor = await conn.execute("select %s::int", [number])
    assert await cursor.fetchone() == (number,)


async def ask_asyncpg(conn: Any, number: int) -> None:
    assert await conn.fetchval("select $1::int", number) == number


async def test_psycopg_without_prepared_statements(bouncer_url: str) -> None:
    async with AsyncConnectionPool(
        bouncer_url, kwargs={"prepare_threshold": None}, max_size=4
    ) as pool:
        await pool.wait()
        assert await errors_of(pool, ask_psycopg) == []
        await pool.check()
        assert pool.statistics().discards == {}


async def test_asyncpg_without_prepared_statements(bouncer_url: str) -> None:
    async with AsyncConnectionPool[asyncpg.Connection](
        bouncer_url, connect=asyncpg.connect, kwargs={"statement_cache_size": 0}, max_size=4
    ) as pool:
        await pool.wait()
        assert await errors_of(pool, ask_asyncpg) == []
