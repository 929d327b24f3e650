"""What programs written for psycopg_pool rely on, for both pools and both null pools."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row
from tests.reservoir.support import eventually, eventually_async

from moored.reservoir import (
    AsyncConnectionPool,
    AsyncNullConnectionPool,
    ConnectionPool,
    NullConnectionPool,
    PoolClosed,
    PoolOverloaded,
    PoolTimeout,
)


def test_a_connection_class_may_have_a_row_type(module_url: str) -> None:
    pool = ConnectionPool(
        module_url,
        max_size=1,
        connection_class=psycopg.Connection[DictRow],
        kwargs={"row_factory": dict_row},
    )
    with pool, pool.connection() as conn:
        assert conn.execute("select 1 as n").fetchone() == {"n": 1}


async def test_an_async_connection_class_may_have_a_row_type(module_url: str) -> None:
    pool = AsyncConnectionPool(
        module_url,
        max_size=1,
        connection_class=psycopg.AsyncConnection[DictRow],
        kwargs={"row_factory": dict_row},
    )
    async with pool, pool.connection() as conn:
        assert await (await conn.execute("select 1 as n")).fetchone() == {"n": 1}


class Noting(ConnectionPool[Any]):
    """A pool of a user's that looks at each connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.notes: list[str] = []
        super().__init__(*args, **kwargs)

    def getconn(self, timeout: float | None = None) -> Any:
        self.notes.append("get")
        return super().getconn(timeout)

    def putconn(self, conn: Any) -> None:
        self.notes.append("put")
        super().putconn(conn)


class AsyncNoting(AsyncConnectionPool[Any]):
    """The same for asyncio."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.notes: list[str] = []
        super().__init__(*args, **kwargs)

    async def getconn(self, timeout: float | None = None) -> Any:
        self.notes.append("get")
        return await super().getconn(timeout)

    async def putconn(self, conn: Any) -> None:
        self.notes.append("put")
        await super().putconn(conn)


def test_a_block_calls_the_methods_of_a_subclass(module_url: str) -> None:
    with Noting(module_url, max_size=1) as pool:
        with pool.connection() as conn:
            conn.execute("create temp table t (n int)")
        with pytest.raises(psycopg.errors.DivisionByZero), pool.connection() as conn:
            conn.execute("insert into t select 1 / 0")
        with pool.connection() as conn:
            assert conn.execute("select count(*) from t").fetchone() == (0,)
        assert pool.notes == ["get", "put"] * 3
        assert pool.statistics().refills == 1


async def test_an_async_block_calls_the_methods_of_a_subclass(module_url: str) -> None:
    async with AsyncNoting(module_url, max_size=1) as pool:
        async with pool.connection() as conn:
            await conn.execute("create temp table t (n int)")
        async with pool.connection() as conn:
            cursor = await conn.execute("select count(*) from t")
            assert await cursor.fetchone() == (0,)
        assert pool.notes == ["get", "put"] * 2


def test_a_connection_that_failed_its_check_is_closed_at_once(module_url: str) -> None:
    checked: list[psycopg.Connection[Any]] = []

    def check(conn: psycopg.Connection[Any]) -> None:
        checked.append(conn)
        if len(checked) == 1:
            raise ValueError("not this one")
        assert checked[0].closed, "before the next one is looked at"

    with ConnectionPool(module_url, max_size=2, check=check) as pool:
        pool.wait()
        with pool.connection():
            assert len(checked) == 2


def test_a_connection_that_comes_back_to_a_closed_pool_is_closed_at_once(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=1) as pool:
        conn = pool.getconn()
        pool.close()
        assert not conn.closed
        pool.putconn(conn)
        assert conn.closed


async def test_an_async_connection_that_failed_its_check_is_closed_at_once(module_url: str) -> None:
    checked: list[psycopg.AsyncConnection[Any]] = []

    async def check(conn: psycopg.AsyncConnection[Any]) -> None:
        checked.append(conn)
        if len(checked) == 1:
            raise ValueError("not this one")
        assert checked[0].closed, "before the next one is looked at"

    async with AsyncConnectionPool(module_url, max_size=2, check=check) as pool:
        await pool.wait()
        async with pool.connection():
            assert len(checked) == 2


async def test_an_async_connection_that_comes_back_to_a_closed_pool_is_closed_at_once(
    module_url: str,
) -> None:
    async with AsyncConnectionPool(module_url, max_size=1) as pool:
        conn = await pool.getconn()
        await pool.close()
        assert not conn.closed
        await pool.putconn(conn)
        assert conn.closed


def test_ready_connections_are_closed_when_close_returns(module_url: str) -> None:
    opened: list[psycopg.Connection[Any]] = []
    with ConnectionPool(module_url, max_size=3, configure=opened.append) as pool:
        pool.wait()
        pool.close()
        assert [conn.closed for conn in opened] == [True] * 3


async def test_ready_async_connections_are_closed_when_close_returns(module_url: str) -> None:
    opened: list[psycopg.AsyncConnection[Any]] = []

    async def configure(conn: psycopg.AsyncConnection[Any]) -> None:
        opened.append(conn)

    async with AsyncConnectionPool(module_url, max_size=3, configure=configure) as pool:
        await pool.wait()
        await pool.close()
        assert [conn.closed for conn in opened] == [True] * 3


def test_every_error_names_the_pool(module_url: str) -> None:
    pool: ConnectionPool = ConnectionPool(module_url, max_size=1, max_waiting=1, name="orders")
    with pool:
        conn = pool.getconn()
        with pytest.raises(PoolTimeout, match=r"^orders: "):
            pool.getconn(timeout=0.01)
        with ThreadPoolExecutor(1) as crew:
            waiting = crew.submit(pool.getconn)
            eventually(lambda: pool.statistics().waiting)
            with pytest.raises(PoolOverloaded, match=r"^orders: "):
                pool.getconn()
            pool.close()
            with pytest.raises(PoolClosed, match=r"^orders "):
                waiting.result()
        pool.putconn(conn)
    with pytest.raises(PoolClosed, match=r"^orders "):
        pool.getconn()
    with pytest.raises(ValueError, match="orders"):
        pool.putconn(conn)


def test_a_conninfo_function_is_called_once_for_each_connection(module_url: str) -> None:
    calls: list[int] = []

    def conninfo() -> str:
        calls.append(1)
        return module_url

    with ConnectionPool(conninfo, min_size=1, max_size=2) as pool:
        pool.wait()
        assert len(calls) == 1
        with pool.connection(), pool.connection():
            assert len(calls) == 2


@pytest.mark.parametrize("kind", [ConnectionPool, AsyncConnectionPool])
@pytest.mark.parametrize("sizes", [{"min_size": 0}, {"min_size": 0, "max_size": 0}])
def test_a_pool_of_no_connections_is_refused(
    kind: Callable[..., Any], sizes: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="max_size"):
        kind("", open=False, **sizes)


def test_a_connection_may_live_and_idle_for_ever(module_url: str) -> None:
    pool: ConnectionPool
    with ConnectionPool(module_url, max_size=2, max_lifetime=math.inf, max_idle=math.inf) as pool:
        pool.wait()
        with pool.connection() as conn:
            assert conn.execute("select 1").fetchone() == (1,)
        assert (pool.max_lifetime, pool.max_idle) == (math.inf, math.inf)
        assert "ready" in repr(pool)


def test_a_connection_for_each_call_of_a_function(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=1) as pool:

        @pool.connection()
        def in_use(number: int) -> int:
            return number * pool.statistics().in_use

        assert [in_use(1), in_use(2)] == [1, 2]
        assert pool.statistics().in_use == 0


async def test_a_connection_for_each_call_of_a_coroutine_function(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=1) as pool:

        @pool.connection()
        async def in_use(number: int) -> int:
            return number * pool.statistics().in_use

        assert [await in_use(1), await in_use(2)] == [1, 2]
        assert pool.statistics().in_use == 0


# -- null pools ------------------------------------------------------------------------------------


def test_a_null_pool_keeps_nothing(module_url: str) -> None:
    with NullConnectionPool(module_url, max_size=2) as pool:
        pool.wait()
        pids = []
        for _ in range(3):
            with pool.connection() as conn:
                pids.append(conn.info.backend_pid)
            assert conn.closed
        assert len(set(pids)) == 3
        assert pool.statistics().discards == {"not_kept": 4}


@pytest.mark.every_loop
async def test_an_async_null_pool_keeps_nothing(module_url: str) -> None:
    async with AsyncNullConnectionPool(module_url, max_size=2) as pool:
        await pool.wait()
        pids = []
        for _ in range(3):
            async with pool.connection() as conn:
                pids.append(conn.info.backend_pid)
            assert conn.closed
        assert len(set(pids)) == 3


@pytest.mark.every_loop
async def test_a_null_pool_hands_over_to_a_caller_that_waits(module_url: str) -> None:
    async with AsyncNullConnectionPool(module_url, max_size=1) as pool:
        first = await pool.getconn()
        waiting = asyncio.create_task(pool.getconn())
        await eventually_async(lambda: pool.statistics().waiting)
        await pool.putconn(first)
        assert await waiting is first
        await pool.putconn(first)
        assert first.closed


def test_a_null_pool_resets_a_connection_only_for_a_caller_that_waits(module_url: str) -> None:
    resets: list[object] = []
    with NullConnectionPool(module_url, max_size=1, reset=resets.append) as pool:
        first = pool.getconn()
        with ThreadPoolExecutor(1) as crew:
            second = crew.submit(pool.getconn)
            eventually(lambda: pool.statistics().waiting)
            pool.putconn(first)
            assert second.result() is first
        assert resets == [first]
        pool.putconn(first)
        assert first.closed
        assert resets == [first], "the second time it was closed"
        assert pool.statistics().discards == {"not_kept": 1}


@pytest.mark.every_loop
async def test_an_async_null_pool_resets_a_connection_only_for_a_caller_that_waits(
    module_url: str,
) -> None:
    resets: list[object] = []
    async with AsyncNullConnectionPool(module_url, max_size=1, reset=resets.append) as pool:
        first = await pool.getconn()
        waiting = asyncio.create_task(pool.getconn())
        await eventually_async(lambda: pool.statistics().waiting)
        await pool.putconn(first)
        assert await waiting is first
        assert resets == [first]
        await pool.putconn(first)
        assert first.closed
        assert resets == [first], "the second time it was closed"


def test_a_null_pool_has_no_limit_unless_one_is_set(module_url: str) -> None:
    with NullConnectionPool(module_url, num_workers=20) as pool:
        held = [pool.getconn() for _ in range(15)]
        for conn in held:
            pool.putconn(conn)
        eventually(lambda: pool.statistics().closing == 0)


@pytest.mark.parametrize("kind", [NullConnectionPool, AsyncNullConnectionPool])
@pytest.mark.parametrize("sizes", [{"min_size": 1}, {"min_size": -1}, {"max_size": -2}])
def test_sizes_that_a_null_pool_cannot_have(
    kind: Callable[..., Any], sizes: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        kind("", open=False, **sizes)


def test_a_null_pool_whose_server_does_not_answer_is_closed_by_wait() -> None:
    pool: NullConnectionPool = NullConnectionPool("host=127.0.0.1 port=1", open=False)
    pool.open()
    with pytest.raises(PoolTimeout):
        pool.wait(0.2)
    assert pool.closed
