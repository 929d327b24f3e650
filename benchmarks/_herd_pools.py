"""The pools of the herd benchmark, each set up as its own documentation says, and full at once."""

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
#: The question is one message, so that nothing but the pool differs.
AUTOCOMMIT = {"autocommit": True}


class Herd(NamedTuple):
    """A pool that is full."""

    #: Opens a block in which a connection is held.
    block: Callable[[], AbstractAsyncContextManager[Any]]
    #: Asks `SELECT 1` on it.
    ask: Callable[[Any], Awaitable[object]]


#: Called at each birth.
Born = Callable[[], None]
Opener = Callable[[str, Born], AbstractAsyncContextManager[Herd]]


async def ask_psycopg(conn: Any) -> object:
    cursor = await conn.execute("SELECT 1")
    return (await cursor.fetchone())[0]


async def ask_ours(conn: Any) -> object:
    if time.monotonic() - conn.born > LIFETIME:
        raise AssertionError("a connection was handed out after its end")
    return await ask_psycopg(conn)


async def ask_asyncpg(conn: Any) -> object:
    return await conn.fetchval("SELECT 1")


async def ask_sqlalchemy(conn: Any) -> object:
    return (await conn.execute(text("SELECT 1"))).scalar_one()


@asynccontextmanager
async def baseline(url: str, born: Born) -> AsyncIterator[Herd]:
    """Ours, in which nothing expires."""

    async def configure(conn: object) -> None:
        born()

    # Its fill is not to be counted with that of the pool beside it: so it has a name of its own.
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
        yield Herd(pool.connection, ask_psycopg)


@asynccontextmanager
async def ours(url: str, born: Born) -> AsyncIterator[Herd]:
    """Ours; its burst is the whole pool, so that it is born together as the others are."""

    async def configure(conn: Any) -> None:
        conn.born = time.monotonic()
        born()

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
        yield Herd(pool.connection, ask_ours)


@asynccontextmanager
async def psycopgs(url: str, born: Born) -> AsyncIterator[Herd]:
    async def configure(conn: object) -> None:
        born()

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
        yield Herd(pool.connection, ask_psycopg)


@asynccontextmanager
async def asyncpgs(url: str, born: Born) -> AsyncIterator[Herd]:
    """It knows no longest life: all connections are told to go when they reach it."""

    async def init(conn: object) -> None:
        born()

    async def expire(pool: Any) -> None:
        while True:
            await asyncio.sleep(LIFETIME)
            await pool.expire_connections()

    async with asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE, init=init) as pool:
        expiring = asyncio.create_task(expire(pool))
        try:
            yield Herd(lambda: pool.acquire(timeout=TIMEOUT), ask_asyncpg)
        finally:
            expiring.cancel()


@asynccontextmanager
async def sqlalchemys(url: str, born: Born) -> AsyncIterator[Herd]:
    engine = create_async_engine(
        make_url(url).set(drivername="postgresql+psycopg"),
        isolation_level="AUTOCOMMIT",
        pool_size=SIZE,
        max_overflow=0,
        pool_timeout=TIMEOUT,
        pool_recycle=LIFETIME,
    )
    event.listen(engine.sync_engine, "connect", lambda *_: born())
    try:
        await fill(engine)
        yield Herd(engine.connect, ask_sqlalchemy)
    finally:
        await engine.dispose()


async def fill(engine: AsyncEngine) -> None:
    """It connects when it is asked for a connection: so it is asked for all of them."""
    conns = await asyncio.gather(*(engine.connect() for _ in range(SIZE)))
    await asyncio.gather(*(conn.close() for conn in conns))


POOLS: dict[str, Opener] = {
    "ours": ours,
    "psycopg_pool": psycopgs,
    "asyncpg": asyncpgs,
    "sqlalchemy": sqlalchemys,
}
