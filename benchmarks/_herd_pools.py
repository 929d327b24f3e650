"""The pools of herd.py, each set up as its documentation says, and filled at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import psycopg_pool
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from moored.reservoir import AsyncConnectionPool, ReservoirConfig

SIZE = 50
RATE = 20.0
LIFETIME = 8.0
TIMEOUT = 5.0
#: A query is one message, so that only the pools differ.
AUTOCOMMIT = {"autocommit": True}


class Herd(NamedTuple):
    """A full pool."""

    #: Returns a context manager that holds a connection.
    block: Callable[[], AbstractAsyncContextManager[Any]]
    #: Runs `SELECT 1` on a connection.
    query: Callable[[Any], Awaitable[object]]


#: Called for each new connection.
OnConnect = Callable[[], None]
Opener = Callable[[str, OnConnect], AbstractAsyncContextManager[Herd]]


async def query_psycopg(conn: Any) -> object:
    cursor = await conn.execute("SELECT 1")
    return (await cursor.fetchone())[0]


async def query_ours(conn: Any) -> object:
    if time.monotonic() - conn.opened_at > LIFETIME:
        raise AssertionError("a connection was handed out after its lifetime")
    return await query_psycopg(conn)


async def query_asyncpg(conn: Any) -> object:
    return await conn.fetchval("SELECT 1")


async def query_sqlalchemy(conn: Any) -> object:
    return (await conn.execute(text("SELECT 1"))).scalar_one()


@asynccontextmanager
async def baseline(url: str, on_connect: OnConnect) -> AsyncIterator[Herd]:
    """Ours, without expiry."""

    async def configure(conn: object) -> None:
        on_connect()

    # Its own endpoint name, so that it does not share the rate limit of the pool under test.
    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
        url,
        max_size=SIZE,
        kwargs=AUTOCOMMIT,
        timeout=TIMEOUT,
        configure=configure,
        endpoint="baseline",
        open=False,
    )
    async with pool:
        await pool.wait()
        yield Herd(pool.connection, query_psycopg)


@asynccontextmanager
async def ours(url: str, on_connect: OnConnect) -> AsyncIterator[Herd]:
    """Ours; its burst is the whole pool, so that it fills at once, as the others do."""

    async def configure(conn: Any) -> None:
        conn.opened_at = time.monotonic()
        on_connect()

    config = ReservoirConfig(
        base_lifetime=LIFETIME - 0.25,
        lifetime_jitter=0.25,
        guard_window=0.25,
        max_size=SIZE,
        rate=RATE,
        burst=SIZE,
        start_stagger=0.0,
    )
    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
        url, config=config, kwargs=AUTOCOMMIT, timeout=TIMEOUT, configure=configure, open=False
    )
    async with pool:
        await pool.wait()
        yield Herd(pool.connection, query_ours)


@asynccontextmanager
async def psycopgs(url: str, on_connect: OnConnect) -> AsyncIterator[Herd]:
    async def configure(conn: object) -> None:
        on_connect()

    pool: psycopg_pool.AsyncConnectionPool[Any] = psycopg_pool.AsyncConnectionPool(
        url,
        min_size=SIZE,
        max_size=SIZE,
        kwargs=AUTOCOMMIT,
        timeout=TIMEOUT,
        max_lifetime=LIFETIME,
        configure=configure,
        open=False,
    )
    async with pool:
        await pool.wait()
        yield Herd(pool.connection, query_psycopg)


@asynccontextmanager
async def asyncpgs(url: str, on_connect: OnConnect) -> AsyncIterator[Herd]:
    """asyncpg's pool, which has no maximum lifetime: expire all connections when they reach it."""

    async def init(conn: object) -> None:
        on_connect()

    async def expire(pool: Any) -> None:
        while True:
            await asyncio.sleep(LIFETIME)
            await pool.expire_connections()

    async with asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE, init=init) as pool:
        expiring = asyncio.create_task(expire(pool))
        try:
            yield Herd(lambda: pool.acquire(timeout=TIMEOUT), query_asyncpg)
        finally:
            expiring.cancel()


@asynccontextmanager
async def sqlalchemys(url: str, on_connect: OnConnect) -> AsyncIterator[Herd]:
    engine = create_async_engine(
        make_url(url).set(drivername="postgresql+psycopg"),
        isolation_level="AUTOCOMMIT",
        pool_size=SIZE,
        max_overflow=0,
        pool_timeout=TIMEOUT,
        pool_recycle=LIFETIME,
    )
    event.listen(engine.sync_engine, "connect", lambda *_: on_connect())
    try:
        await fill(engine)
        yield Herd(engine.connect, query_sqlalchemy)
    finally:
        await engine.dispose()


async def fill(engine: AsyncEngine) -> None:
    """Check out all connections: the engine opens each at its first checkout."""
    conns = await asyncio.gather(*(engine.connect() for _ in range(SIZE)))
    await asyncio.gather(*(conn.close() for conn in conns))


POOLS: dict[str, Opener] = {
    "ours": ours,
    "psycopg_pool": psycopgs,
    "asyncpg": asyncpgs,
    "sqlalchemy": sqlalchemys,
}
