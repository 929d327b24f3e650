"""`asyncpg.create_pool` and Moored's: each test runs with both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from tests.servers import free_port

from moored.reservoir import PoolClosed, PoolTimeout
from moored.reservoir.asyncpg import AsyncpgPool, create_pool

Create = Callable[..., Any]
BOTH = pytest.mark.parametrize("create", [asyncpg.create_pool, create_pool])
#: The one method that Moored's pool lacks: it has `tokens=` instead.
ABSENT = {"set_connect_args"}
SIZES: dict[str, Any] = {"min_size": 1, "max_size": 2}


def test_every_method_and_parameter_exists() -> None:
    names = {name for name in dir(asyncpg.Pool) if not name.startswith("_")}
    assert {name for name in names if not hasattr(AsyncpgPool, name)} == ABSENT
    theirs, ours = inspect.signature(asyncpg.create_pool), inspect.signature(create_pool)
    by_keyword = {"connection_class", "record_class"}  # for `asyncpg.connect`
    assert set(theirs.parameters) - by_keyword <= set(ours.parameters)


@BOTH
async def test_the_pool_has_the_methods_of_a_connection(create: Create, module_url: str) -> None:
    async with create(module_url, **SIZES, command_timeout=60) as pool:
        assert await pool.execute("create temp table t (n int)") == "CREATE TABLE"
        await pool.execute("drop table if exists orders; create table orders (id int, name text)")
        await pool.executemany("insert into orders values ($1, $2)", [(1, "tea"), (2, "rice")])
        await pool.copy_records_to_table("orders", records=[(3, "salt")])
        rows = await pool.fetch("select id, name from orders where id < $1 order by id", 3)
        assert [tuple(row) for row in rows] == [(1, "tea"), (2, "rice")]
        assert (await pool.fetchrow("select * from orders where id = $1", 3))["name"] == "salt"
        assert await pool.fetchval("select id, name from orders where id = 1", column=1) == "tea"
        assert await pool.fetchval("select count(*) from orders") == 3


@BOTH
async def test_a_block_of_acquire_returns_the_connection(create: Create, module_url: str) -> None:
    async with create(module_url, min_size=1, max_size=1) as pool:
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with pool.acquire() as conn, conn.transaction():
                await conn.execute("select 1/0")
        async with pool.acquire() as conn:
            pid = await conn.fetchval("select pg_backend_pid()")
            await conn.execute("set application_name = 'changed'")
            assert (pool.get_size(), pool.get_idle_size()) == (1, 0)
            with pytest.raises(TimeoutError):
                async with pool.acquire(timeout=0.01):
                    pass
        assert await pool.fetchval("select pg_backend_pid()") == pid
        assert await pool.fetchval("show application_name") != "changed"  # it was reset


@BOTH
async def test_an_awaited_connection_is_released_once(create: Create, module_url: str) -> None:
    pool = await create(module_url, min_size=1, max_size=1)
    conn = await pool.acquire(timeout=5)
    assert await conn.fetchval("select 1") == 1
    await pool.release(conn)
    await pool.release(conn)
    async with pool.acquire() as conn:
        pass
    assert (pool.get_size(), pool.get_idle_size()) == (1, 1)
    assert (pool.get_min_size(), pool.get_max_size()) == (1, 1)
    assert not pool.is_closing()
    await pool.close()
    assert pool.is_closing()
    with pytest.raises((asyncpg.InterfaceError, PoolClosed)):
        await pool.fetch("select 1")


@BOTH
async def test_init_and_setup_and_reset_are_called(create: Create, module_url: str) -> None:
    called: list[str] = []

    def note(word: str) -> Callable[[Any], Any]:
        async def noted(conn: Any) -> None:
            called.append(word)
            assert await conn.fetchval("select 1") == 1

        return noted

    pool = await create(
        module_url,
        **{**SIZES, "max_size": 1},
        init=note("init"),
        setup=note("setup"),
        reset=note("reset"),
    )
    assert called == ["init"]
    assert await pool.fetchval("select 1") == 1
    await pool.release(await pool.acquire())
    assert called == ["init", *("setup", "reset") * 2]
    await pool.close()


@BOTH
@pytest.mark.parametrize("block", [True, False])
async def test_an_error_of_setup_is_the_caller_s(
    create: Create, module_url: str, block: bool
) -> None:
    fails = iter([True, False])

    async def setup(conn: Any) -> None:
        await asyncio.sleep(0)
        if next(fails):
            raise LookupError("no codec")

    async with create(module_url, min_size=1, max_size=1, setup=setup) as pool:
        with pytest.raises(LookupError):
            await (pool.acquire().__aenter__() if block else pool.acquire())
        assert await pool.fetchval("select 1") == 1


@BOTH
async def test_expired_connections_are_replaced(create: Create, module_url: str) -> None:
    async with create(module_url, min_size=1, max_size=1) as pool:
        pid = await pool.fetchval("select pg_backend_pid()")
        await pool.expire_connections()
        assert await pool.fetchval("select pg_backend_pid()") != pid


@BOTH
async def test_terminate_aborts_connections_in_use(create: Create, module_url: str) -> None:
    pool = await create(module_url, **SIZES)
    conn = await pool.acquire()
    sleeping = asyncio.create_task(conn.execute("select pg_sleep(3600)"))
    await asyncio.sleep(0)
    pool.terminate()
    with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)):
        await sleeping
    await asyncio.sleep(0)
    assert pool.is_closing()


@BOTH
async def test_a_custom_class_and_connect_function_are_used(
    create: Create, module_url: str
) -> None:
    class Own(asyncpg.Connection):
        """A class of a user's own."""

    calls: list[Any] = []

    async def connect(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return await asyncpg.connect(*args, **kwargs)

    own = {"connection_class": Own, "connect": connect}
    async with create(module_url, **SIZES, **own) as pool, pool.acquire() as conn:
        assert "Own" in repr(conn)
        assert conn.is_in_transaction() is False
    assert calls[0] == (module_url,)


@BOTH
async def test_a_server_that_cannot_be_reached_is_an_error_of_create_pool(create: Create) -> None:
    waits = {"acquire_timeout": 0.1} if create is create_pool else {}
    with pytest.raises((PoolTimeout, OSError), match=r"(?i)connect"):
        await create(host="127.0.0.1", port=free_port(), user="app", **SIZES, **waits)
