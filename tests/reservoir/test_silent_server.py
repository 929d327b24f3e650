"""A server that is stopped with SIGSTOP keeps its connections, and answers nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from tests.frozen import frozen
from tests.reservoir.harness import until
from tests.reservoir.support import eventually

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import AsyncConnectionPool, ConnectionPool, Statistics
from moored.reservoir._silence import LOOK

#: Three times the five seconds within which a silence is reported.
PROMISED = 15.0


@pytest.fixture(scope="module")
def server() -> Iterator[SyncEmbeddedPostgres]:
    """A server that nothing else uses."""
    with SyncEmbeddedPostgres() as server:
        yield server


@asynccontextmanager
async def callers(pool: AsyncConnectionPool, number: int, query: str) -> AsyncIterator[None]:
    """Let so many callers run a query again and again; none of them may fail."""
    ends = asyncio.Event()

    async def call() -> None:
        while not ends.is_set():
            async with pool.connection() as conn:
                await conn.execute(query)

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(call())
        yield
        ends.set()


@pytest.mark.parametrize("number", [1, 4, 6])
async def test_a_silent_server_is_reported_while_callers_wait_and_no_longer(
    number: int, server: SyncEmbeddedPostgres
) -> None:
    """With a connection that is ready, with none, and with more callers than connections."""
    async with AsyncConnectionPool(server.url, max_size=4) as pool:
        await pool.wait()
        async with callers(pool, number, "select pg_sleep(0.05)"):
            for _ in range(2):
                await until(lambda: pool.statistics().returns > 10, "queries are answered")
                assert pool.statistics().silent == 0.0
                with frozen(server) as began:
                    await until(lambda: pool.statistics().silent, "the silence is reported")
                    assert time.monotonic() - began < PROMISED
                    assert f"{pool.reservoir.place} has not answered for" in (
                        pool.reservoir.whereabouts()
                    )
                await until(lambda: not pool.statistics().silent, "the server answers again")


async def test_a_stop_of_a_second_is_no_silence(server: SyncEmbeddedPostgres) -> None:
    async with AsyncConnectionPool(server.url, max_size=4) as pool:
        await pool.wait()
        seen: list[float] = []
        async with callers(pool, 6, "select pg_sleep(0.05)"):
            with frozen(server):
                await asyncio.sleep(1.0)
            for _ in range(10):
                seen.append(pool.statistics().silent)
                await asyncio.sleep(LOOK / 2)
        assert set(seen) == {0.0}


@pytest.mark.parametrize("query", ["select pg_sleep(5)", "begin"])
async def test_a_busy_pool_is_not_a_silent_server(query: str, server: SyncEmbeddedPostgres) -> None:
    """All connections are in use for long, by statements or by transactions, and callers wait."""
    async with AsyncConnectionPool(server.url, max_size=2) as pool:
        await pool.wait()
        seen: list[Statistics] = []

        async def use() -> None:
            async with pool.connection() as conn:
                await conn.execute(query)
                await asyncio.sleep(0 if "sleep" in query else 5.0)

        async with asyncio.TaskGroup() as group:
            uses = [group.create_task(use()) for _ in range(3)]
            while not uses[0].done():
                await asyncio.sleep(LOOK / 2)
                seen.append(pool.statistics())
        assert {each.silent for each in seen} == {0.0}
        assert max(each.longest_wait for each in seen) > 3.0
        assert pool.statistics().longest_wait == 0.0


async def test_an_idle_pool_to_the_same_server_reports_its_silence_too(
    server: SyncEmbeddedPostgres,
) -> None:
    async with (
        AsyncConnectionPool(server.url, max_size=2) as busy,
        AsyncConnectionPool(server.url, max_size=1) as idle,
    ):
        await busy.wait()
        await idle.wait()
        async with callers(busy, 1, "select pg_sleep(0.05)"):
            with frozen(server):
                await until(lambda: idle.statistics().silent, "the silence is reported")
            await until(lambda: not idle.statistics().silent, "the server answers again")


def test_a_pool_for_threads_reports_a_silent_server(server: SyncEmbeddedPostgres) -> None:
    with ConnectionPool(server.url, max_size=1) as pool, ThreadPoolExecutor(1) as thread:
        pool.wait()
        with pool.connection() as conn:
            with frozen(server):
                answer = thread.submit(conn.execute, "select 1")
                eventually(lambda: pool.statistics().silent > 0)
            answer.result(PROMISED)
            eventually(lambda: not pool.statistics().silent)
