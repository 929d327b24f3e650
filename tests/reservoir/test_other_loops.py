"""An async pool that is used from other event loops than its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import asyncpg
import psycopg
import pytest
from asgiref.sync import async_to_sync
from tests.reservoir.support import eventually_async

from moored.reservoir import AsyncConnectionPool, PoolClosed, PoolTimeout

LIMIT = 60.0
Psycopg = AsyncConnectionPool[psycopg.AsyncConnection[Any]]


def elsewhere(work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Future[Any]:
    """Run this on an event loop of its own, in another thread."""
    return asyncio.ensure_future(asyncio.to_thread(lambda: asyncio.run(work())))


async def pid_of(pool: Psycopg) -> int:
    async with pool.connection() as conn:
        [row] = await (await conn.execute("select pg_backend_pid()")).fetchall()
        return int(row[0])


def run_by_asyncio(work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    return asyncio.run(work(*args))


def run_by_asgiref(work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    return async_to_sync(work)(*args)


@pytest.mark.parametrize("run", [run_by_asyncio, run_by_asgiref])
def test_loops_that_end_share_a_pool(run: Callable[..., Any], module_url: str) -> None:
    pool: Psycopg = AsyncConnectionPool(module_url, max_size=1)
    first, *others = [run(pid_of, pool) for _ in range(4)]
    assert first not in others
    assert len(set(others)) == 1
    run(pool.close)
    assert pool.closed
    with pytest.raises(PoolClosed):
        run(pid_of, pool)


def test_a_loop_that_rests_lends_what_is_ready(module_url: str) -> None:
    async def use_all(pool: Psycopg) -> None:
        async with pool.connection():
            with pytest.raises(PoolClosed, match="rests, and no connection is ready"):
                await pid_of(pool)

    with asyncio.Runner() as home:
        pool: Psycopg = AsyncConnectionPool(module_url, max_size=1, open=False)
        home.run(pool.open(wait=True))
        pids = {home.run(pid_of(pool)), *(asyncio.run(pid_of(pool)) for _ in range(3))}
        asyncio.run(use_all(pool))
        assert {home.run(pid_of(pool))} == pids
        assert pool.statistics().in_use == 0
        home.run(pool.close())


async def test_callers_of_all_loops_are_served(module_url: str) -> None:
    held: set[int] = set()
    lock = threading.Lock()

    async def use(pool: Psycopg) -> None:
        for _ in range(5):
            async with pool.connection(timeout=LIMIT) as conn:
                pid = conn.info.backend_pid
                with lock:
                    assert pid not in held
                    held.add(pid)
                await conn.execute("select 1")
                with lock:
                    held.remove(pid)

    async def several() -> None:
        await asyncio.gather(use(pool), use(pool))

    async with AsyncConnectionPool(module_url, max_size=2) as pool:
        await asyncio.gather(several(), *(elsewhere(several) for _ in range(4)))
        now = pool.statistics()
        assert (now.checkouts, now.returns, now.in_use, now.refills) == (50, 50, 0, 2)


async def test_a_block_on_another_loop_commits_or_rolls_back(module_url: str) -> None:
    async def fails() -> None:
        async with pool.connection() as conn:
            await conn.execute("insert into kept values (2)")
            raise LookupError

    async def writes() -> None:
        async with pool.connection() as conn:
            await conn.execute("insert into kept values (1)")
        conn = await pool.getconn()
        await conn.execute("insert into kept values (3)")
        await pool.putconn(conn)

    async with AsyncConnectionPool(module_url, max_size=1) as pool:
        async with pool.connection() as conn:
            await conn.execute("create table kept (n int)")
        with pytest.raises(LookupError):
            await elsewhere(fails)
        await elsewhere(writes)
        async with pool.connection() as conn:
            assert await (await conn.execute("select n from kept")).fetchall() == [(1,)]


async def test_a_caller_on_another_loop_that_gives_up_keeps_no_connection(module_url: str) -> None:
    async def give_up() -> None:
        with pytest.raises(PoolTimeout):
            await pool.getconn(timeout=0.01)
        waiting = asyncio.create_task(pool.getconn())
        await eventually_async(lambda: pool.statistics().waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async with AsyncConnectionPool(module_url, max_size=1) as pool:
        async with pool.connection():
            await elsewhere(give_up)
        async with pool.connection(timeout=LIMIT):
            assert pool.statistics().in_use == 1


async def test_the_methods_of_a_pool_work_from_another_loop(module_url: str) -> None:
    async def manage() -> None:
        await pool.wait(LIMIT)
        await pool.resize(1, 3)
        await pool.check()
        await pool.drain()
        await pool.close()

    pool = AsyncConnectionPool(module_url, max_size=2)
    async with pool:
        await elsewhere(manage)
        assert (pool.closed, pool.max_size) == (True, 3)


async def test_a_connection_that_outlives_the_loop_of_its_pool_is_closed(module_url: str) -> None:
    pool: Psycopg = AsyncConnectionPool(module_url, max_size=1)
    taken, ended = threading.Event(), threading.Event()

    async def hold() -> psycopg.AsyncConnection[Any]:
        async with pool.connection() as conn:
            taken.set()
            await asyncio.to_thread(ended.wait, LIMIT)
            await conn.execute("select 1")
        return conn

    async def open_first() -> asyncio.Future[Any]:
        await pool.open()
        holding = loop.run_in_executor(None, lambda: asyncio.run(hold()))
        await asyncio.to_thread(taken.wait, LIMIT)
        return holding

    loop = asyncio.get_running_loop()
    holding = await elsewhere(open_first)
    async with pool.connection() as conn:
        await conn.execute("select 1")
        ended.set()
        assert (await holding).closed
    await pool.close()


async def test_a_return_to_a_loop_that_ends_meanwhile_is_an_error(module_url: str) -> None:
    pool: Psycopg = AsyncConnectionPool(module_url, max_size=1)
    taken, returning = threading.Event(), threading.Event()

    async def hold() -> None:
        async with pool.connection():
            taken.set()
            await asyncio.to_thread(returning.wait, LIMIT)

    async def open_first() -> asyncio.Future[Any]:
        await pool.open()
        holding = loop.run_in_executor(None, lambda: asyncio.run(hold()))
        await asyncio.to_thread(taken.wait, LIMIT)
        asyncio.get_running_loop().call_soon(end)
        return holding

    def end() -> None:
        """Keep the loop from serving the return, until it ends."""
        returning.set()
        time.sleep(0.2)

    loop = asyncio.get_running_loop()
    holding = await elsewhere(open_first)
    with suppress(PoolClosed):
        async with asyncio.timeout(LIMIT):
            await holding
    async with pool.connection(timeout=LIMIT) as conn:
        await conn.execute("select 1")
    await pool.close()


async def test_asyncpg_connections_work_on_their_own_loop_only(module_url: str) -> None:
    async def use() -> None:
        async with pool.connection():
            pass

    async with AsyncConnectionPool[Any](module_url, connect=asyncpg.connect, max_size=1) as pool:
        with pytest.raises(PoolClosed, match="on another event loop, and its connections"):
            await elsewhere(use)
