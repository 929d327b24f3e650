"""Every parameter, method and attribute of psycopg_pool's pools, one by one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg.conninfo import make_conninfo
from tests.reservoir.support import PATIENCE, eventually, through
from tests.servers import free_port

from moored import reservoir
from moored.reservoir import (
    AsyncConnectionPool,
    ConnectionPool,
    PoolClosed,
    PoolTimeout,
    ReservoirConfig,
)
from moored.testing import FaultProxy

LOGGER = "moored.reservoir"
PAIRS = [
    (psycopg_pool.ConnectionPool, ConnectionPool),
    (psycopg_pool.AsyncConnectionPool, AsyncConnectionPool),
]
#: What psycopg_pool uses inside, although the names look public.
INSIDE = {"reconnect_failed", "run_task", "schedule_task", "worker"}


class Named(psycopg.Connection[Any]):
    """A class of a user's own."""


class AsyncNamed(psycopg.AsyncConnection[Any]):
    """The same for asyncio."""


@pytest.fixture(autouse=True)
def no_server_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pool(module_url: str) -> Iterator[ConnectionPool]:
    with ConnectionPool(module_url, max_size=2) as pool:
        yield pool


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_parameter_is_accepted(theirs: Any, ours: Any) -> None:
    ours_by_name = inspect.signature(ours).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        assert ours_by_name[name].kind == parameter.kind, name


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_method_has_the_same_parameters(theirs: Any, ours: Any) -> None:
    for name in sorted({name for name in dir(theirs) if not name.startswith("_")} - INSIDE):
        member, other = getattr(theirs, name), getattr(ours, name)
        if not callable(member):
            continue
        mine = inspect.signature(other).parameters
        for parameter in inspect.signature(member).parameters.values():
            assert mine[parameter.name].default == parameter.default, f"{name}({parameter.name})"
        assert inspect.iscoroutinefunction(member) == inspect.iscoroutinefunction(other), name


def test_every_attribute_exists(module_url: str) -> None:
    with (
        psycopg_pool.ConnectionPool(module_url, min_size=1, name="both", open=False) as theirs,
        ConnectionPool(module_url, min_size=1, name="both", open=False) as ours,
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")} - INSIDE
        assert not {name for name in names if not hasattr(ours, name)}
        same = ("name", "min_size", "max_size", "timeout", "max_waiting", "closed", "conninfo")
        for name in same:
            assert getattr(ours, name) == getattr(theirs, name), name
        theirs.wait()
        assert set(theirs.get_stats()) <= set(ours.get_stats())


def test_every_error_has_the_same_base_classes() -> None:
    for name in ("PoolTimeout", "PoolClosed"):
        assert issubclass(getattr(reservoir, name), psycopg.OperationalError)
        assert issubclass(getattr(psycopg_pool, name), psycopg.OperationalError)
    assert issubclass(reservoir.TooManyRequests, psycopg.OperationalError)
    assert not issubclass(reservoir.TooManyRequests, PoolTimeout | PoolClosed)
    assert reservoir.TooManyRequests is reservoir.PoolOverloaded


# -- how to connect --------------------------------------------------------------------------------


def test_conninfo_and_kwargs_are_merged(module_url: str) -> None:
    pool = ConnectionPool(module_url, min_size=1, kwargs={"application_name": "shop"})
    with pool, pool.connection() as conn:
        assert conn.info.get_parameters()["application_name"] == "shop"


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_the_connection_class_is_known_if_it_is_not_passed(theirs: Any, ours: Any) -> None:
    assert ours("", open=False).connection_class is theirs("", open=False).connection_class
    own = AsyncNamed if ours is AsyncConnectionPool else Named
    assert ours("", connection_class=own, open=False).connection_class is own
    assert ours("", connect=lambda: None, open=False).connection_class is None


def test_overridden_resolvers_are_called_for_each_connection(module_url: str) -> None:
    class Rotating(ConnectionPool[psycopg.Connection[Any]]):
        numbers = iter(range(100))

        def _resolve_conninfo(self) -> str:
            name = f"app-{next(self.numbers)}"
            return make_conninfo(super()._resolve_conninfo(), application_name=name)

        def _resolve_kwargs(self) -> dict[str, Any]:
            return {**super()._resolve_kwargs(), "options": "-c geqo_threshold=5"}

    with Rotating(module_url, min_size=1, max_size=1, kwargs={"connect_timeout": 7}) as pool:
        with pool.connection() as conn:
            assert conn.info.get_parameters()["application_name"] == "app-0"
            assert conn.info.get_parameters()["connect_timeout"] == "7"
            assert conn.execute("show geqo_threshold").fetchone() == ("5",)
        pool.drain()
        with pool.connection() as conn:
            assert conn.info.get_parameters()["application_name"] == "app-1"


async def test_overridden_async_resolvers_are_called_for_each_connection(module_url: str) -> None:
    class Rotating(AsyncConnectionPool[psycopg.AsyncConnection[Any]]):
        async def _resolve_conninfo(self) -> str:
            return make_conninfo(await super()._resolve_conninfo(), application_name="own")

        async def _resolve_kwargs(self) -> dict[str, Any]:
            return {**await super()._resolve_kwargs(), "options": "-c geqo_threshold=5"}

    async def conninfo() -> str:
        await asyncio.sleep(0)
        return module_url

    async with Rotating(conninfo, min_size=1) as pool, pool.connection() as conn:
        assert conn.info.get_parameters()["application_name"] == "own"
        assert await (await conn.execute("show geqo_threshold")).fetchone() == ("5",)


@pytest.mark.parametrize("given", ["host=a", lambda: "host=a"])
async def test_the_resolvers_return_what_a_connection_is_opened_with(given: Any) -> None:
    """Programs open a connection beside the pool by these names."""
    options = {"application_name": "beside"}
    threads = ConnectionPool(given, kwargs=lambda: options, open=False)
    assert (threads._resolve_conninfo(), threads._resolve_kwargs()) == ("host=a", options)
    pool = AsyncConnectionPool(given, kwargs=options, open=False)
    assert (await pool._resolve_conninfo(), await pool._resolve_kwargs()) == ("host=a", options)
    empty = AsyncConnectionPool(open=False)
    assert (await empty._resolve_conninfo(), await empty._resolve_kwargs()) == ("", {})


def test_a_callable_conninfo_is_called_for_each_connection(module_url: str) -> None:
    asked: list[str] = []

    def conninfo() -> str:
        asked.append(threading.current_thread().name)
        return module_url

    with ConnectionPool(conninfo, min_size=1) as pool:
        pool.wait()
        before = len(asked)
        pool.drain()
        with pool.connection():
            assert len(asked) == before + 1
    assert threading.current_thread().name not in asked


async def test_a_conninfo_function_may_be_async(module_url: str) -> None:
    async def conninfo() -> str:
        await asyncio.sleep(0)
        return module_url

    async def kwargs() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"application_name": "awaited"}

    pool = AsyncConnectionPool(conninfo, min_size=1, kwargs=kwargs)
    async with pool, pool.connection() as conn:
        assert conn.info.get_parameters()["application_name"] == "awaited"


def test_callable_kwargs_are_called_for_each_connection(module_url: str) -> None:
    numbers = iter(range(100))
    with ConnectionPool(
        module_url, min_size=1, kwargs=lambda: {"application_name": f"app-{next(numbers)}"}
    ) as pool:
        with pool.connection() as conn:
            first = conn.info.get_parameters()["application_name"]
        pool.drain()
        with pool.connection() as conn:
            assert conn.info.get_parameters()["application_name"] != first


def test_connection_class(module_url: str) -> None:
    pool = ConnectionPool(module_url, min_size=1, connection_class=Named)
    with pool, pool.connection() as conn:
        assert type(conn) is Named


async def test_connection_class_for_asyncio(module_url: str) -> None:
    pool = AsyncConnectionPool(module_url, min_size=1, connection_class=AsyncNamed)
    async with pool, pool.connection() as conn:
        assert type(conn) is AsyncNamed


@pytest.mark.parametrize("wrong", [AsyncNamed, object, "Named"])
def test_a_wrong_connection_class_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a subclass of psycopg\.Connection"):
        ConnectionPool("", connection_class=wrong, open=False)


def test_configure_is_called_once_for_each_connection(module_url: str) -> None:
    seen: list[int] = []

    def configure(conn: psycopg.Connection[Any]) -> None:
        seen.append(conn.info.backend_pid)
        conn.execute("set search_path to elsewhere")
        conn.commit()

    with ConnectionPool(module_url, min_size=2, configure=configure) as pool:
        pool.wait()
        for _ in range(3):
            with pool.connection() as conn:
                assert conn.execute("show search_path").fetchone() == ("elsewhere",)
        assert len(seen) == len(set(seen)) == 2


async def test_configure_may_be_async(module_url: str) -> None:
    async def configure(conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.set_autocommit(True)

    pool = AsyncConnectionPool(module_url, min_size=1, configure=configure)
    async with pool, pool.connection() as conn:
        assert conn.autocommit


def test_a_connection_that_configure_leaves_in_a_transaction_is_refused(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ConnectionPool(
        module_url, min_size=1, configure=lambda conn: conn.execute("select 1")
    ) as pool:
        eventually(lambda: pool.statistics().refill_failures.get("configure"))
        with pytest.raises(PoolTimeout, match="the configure callback left a connection in a"):
            pool.getconn(timeout=0.3)
    assert "could not open a connection (configure)" in caplog.text


# -- how many --------------------------------------------------------------------------------------


def test_min_size_and_max_size(module_url: str) -> None:
    with ConnectionPool(module_url, min_size=1, max_size=2) as pool:
        pool.wait()
        assert pool.get_stats()["pool_size"] == 1
        with pool.connection(), pool.connection():
            assert pool.get_stats()["pool_size"] == 2
            with pytest.raises(PoolTimeout):
                pool.getconn(timeout=0.01)


def test_min_size_alone_is_the_maximum_too(module_url: str) -> None:
    pool = ConnectionPool(module_url, min_size=3, open=False)
    assert (pool.min_size, pool.max_size) == (3, 3)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"min_size": -1}, "target_ready=-1"),
        ({"min_size": 2, "max_size": 1}, "target_ready=2 must be between 0 and max_size=1"),
        ({"min_size": 0, "max_size": 0}, "max_size=0 must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(
    sizes: dict[str, int], text: str, pool: ConnectionPool
) -> None:
    with pytest.raises(ValueError, match=text):
        ConnectionPool("", open=False, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        pool.resize(sizes["min_size"], sizes.get("max_size"))
    assert (pool.min_size, pool.max_size) == (2, 2)


def test_num_workers_limits_the_connects_in_progress(module_url: str) -> None:
    pool = ConnectionPool(module_url, num_workers=2, open=False)
    assert pool.config.max_in_flight == pool.num_workers == 2
    with pytest.raises(ValueError, match="max_in_flight=0 must be at least 1"):
        ConnectionPool(module_url, num_workers=0, open=False)


def test_max_lifetime_and_max_idle(module_url: str) -> None:
    pool = ConnectionPool(module_url, max_lifetime=100.0, max_idle=7.0, open=False)
    config = pool.config
    assert config.base_lifetime + config.lifetime_jitter == pool.max_lifetime == 100.0
    assert config.guard_window == 10.0
    assert config.max_idle == pool.max_idle == 7.0


def test_connections_not_needed_for_max_idle_are_closed(module_url: str) -> None:
    with ConnectionPool(
        module_url, min_size=1, max_size=3, max_idle=0.1, config=ReservoirConfig(scan_every=0.02)
    ) as pool:
        with pool.connection(), pool.connection(), pool.connection():
            assert pool.get_stats()["pool_size"] == 3
        eventually(lambda: pool.get_stats()["pool_size"] == 1)
        assert pool.statistics().discards["idle"] == 2


def test_max_waiting(module_url: str) -> None:
    with ConnectionPool(module_url, min_size=1, max_waiting=1) as pool, pool.connection():
        waiter = threading.Thread(target=lambda: pool.putconn(pool.getconn()))
        waiter.start()
        eventually(lambda: pool.get_stats()["requests_waiting"] == 1)
        with pytest.raises(reservoir.PoolOverloaded, match=r"1 callers wait already \(max_waiting"):
            pool.getconn()
    waiter.join()


# -- open and close --------------------------------------------------------------------------------


def test_open_false_opens_nothing(module_url: str) -> None:
    pool = ConnectionPool(module_url, open=False, name="shop")
    states = [pool.closed]
    with pytest.raises(PoolClosed, match="shop is not open: open it first"):
        pool.getconn()
    with pytest.raises(PoolClosed):
        pool.wait()
    pool.open()
    pool.open()
    states.append(pool.closed)
    pool.wait()
    pool.close()
    pool.close()
    assert [*states, pool.closed] == [True, False, True]
    with pytest.raises(PoolClosed, match="was closed: create a new one"):
        pool.open()


@pytest.mark.parametrize("opening", [True, None])
async def test_an_async_pool_opens_itself(module_url: str, opening: bool | None) -> None:
    pool = AsyncConnectionPool(module_url, min_size=1, open=opening)
    states = [pool.closed]
    async with pool.connection() as conn:
        await conn.execute("select 1")
    await pool.close()
    assert [*states, pool.closed] == [False, True]


async def test_an_async_pool_that_opens_itself_can_be_waited_for(module_url: str) -> None:
    pool = AsyncConnectionPool(module_url, min_size=2, open=True)
    await pool.wait()
    assert pool.get_stats()["pool_available"] == 2
    await pool.close()


async def test_an_async_pool_with_open_false_is_opened_explicitly(module_url: str) -> None:
    pool = AsyncConnectionPool(module_url, min_size=1, open=False)
    assert pool.closed
    with pytest.raises(PoolClosed):
        await pool.getconn()
    await pool.open()
    await pool.open(wait=True)
    assert pool.get_stats()["pool_available"] == 1
    await pool.close()
    await pool.close()
    with pytest.raises(PoolClosed):
        await pool.open()


def test_wait_gives_up_and_closes() -> None:
    pool = ConnectionPool(f"host=127.0.0.1 port={free_port()}", min_size=1)
    with pytest.raises(PoolTimeout, match=r"has 0 of 1 connections after 0\.2 s.*refused"):
        pool.wait(timeout=0.2)
    assert pool.closed


def test_name(module_url: str) -> None:
    first = ConnectionPool(module_url, open=False)
    second = ConnectionPool(module_url, open=False)
    assert first.name.startswith("pool-")
    assert first.name != second.name
    assert ConnectionPool(module_url, name="orders", open=False).name == "orders"


# -- what is done with a connection ----------------------------------------------------------------


def test_check_is_called_before_each_checkout(module_url: str) -> None:
    seen: list[Any] = []
    with ConnectionPool(module_url, min_size=1, check=seen.append) as pool:
        with pool.connection() as conn:
            assert seen == [conn]
        pool.putconn(pool.getconn())
        assert seen == [conn, conn]


def test_a_connection_that_fails_its_check_is_replaced(module_url: str) -> None:
    def check(conn: psycopg.Connection[Any]) -> None:
        if conn is first:
            raise psycopg.OperationalError("not this one")

    first: Any = None
    with ConnectionPool(module_url, min_size=1, check=check) as pool:
        with pool.connection() as first:
            pass
        with pool.connection(timeout=5.0) as second:
            assert second is not first
        assert first.closed
        assert pool.get_stats()["requests_num"] == 2
        assert pool.get_stats()["connections_lost"] == 1


def test_check_connection_is_a_check(module_url: str, observer: psycopg.Connection[Any]) -> None:
    with ConnectionPool(module_url, min_size=1, check=ConnectionPool.check_connection) as pool:
        with pool.connection() as conn:
            pid = conn.info.backend_pid
        observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
        with pool.connection() as conn:
            assert conn.info.backend_pid != pid
            assert conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_check_connection_for_asyncio(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    check = AsyncConnectionPool.check_connection
    async with AsyncConnectionPool(module_url, min_size=1, check=check) as pool:
        async with pool.connection() as conn:
            pid = conn.info.backend_pid
        observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
        async with pool.connection() as conn:
            assert conn.info.backend_pid != pid


def test_reset_is_called_at_each_return(module_url: str) -> None:
    def reset(conn: psycopg.Connection[Any]) -> None:
        conn.execute("reset search_path")
        conn.commit()

    with ConnectionPool(module_url, min_size=1, reset=reset) as pool:
        with pool.connection() as conn:
            conn.execute("set search_path to elsewhere")
        with pool.connection() as conn:
            assert conn.execute("show search_path").fetchone() != ("elsewhere",)


@pytest.mark.parametrize("statement", ["select 1/0", "select 1"])
def test_a_connection_that_reset_breaks_or_leaves_in_a_transaction_is_replaced(
    module_url: str, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ConnectionPool(module_url, min_size=1, reset=lambda conn: conn.execute(statement)) as pool:
        with pool.connection() as first:
            pass
        with pool.connection() as second:
            assert second is not first
        assert pool.get_stats()["returns_bad"] == 2
    assert "reset" in caplog.text


def test_close_returns(module_url: str) -> None:
    with ConnectionPool(module_url, min_size=1, close_returns=True) as pool:
        conn = pool.getconn()
        conn.close()
        conn.close()
        assert not conn.closed
        assert pool.get_stats()["pool_available"] == 1
        with pool.connection() as conn:
            conn.close()
            conn.execute("select 1")
            assert pool.get_stats()["pool_available"] == 0
        assert pool.get_stats()["pool_available"] == 1
    assert conn.closed


async def test_close_returns_for_asyncio(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, min_size=1, close_returns=True) as pool:
        conn = await pool.getconn()
        await conn.close()
        await conn.close()
        assert not conn.closed
        assert pool.get_stats()["pool_available"] == 1
        async with pool.connection() as conn:
            await conn.close()
        assert pool.get_stats()["pool_available"] == 1
    assert conn.closed


def test_a_transaction_left_open_is_rolled_back_with_a_warning(
    pool: ConnectionPool, caplog: pytest.LogCaptureFixture
) -> None:
    conn = pool.getconn()
    conn.execute("create table left_open (n int)")
    pool.putconn(conn)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.name == LOGGER
    assert record.getMessage().startswith(
        f"{pool.name}: rolling back a connection left in a transaction: "
    )
    assert conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with pool.connection() as conn, pytest.raises(psycopg.errors.UndefinedTable):
        conn.execute("select * from left_open")


async def test_a_transaction_left_open_under_asyncio(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncConnectionPool(module_url, min_size=1) as pool:
        conn = await pool.getconn()
        await conn.execute("select 1")
        await pool.putconn(conn)
        assert "rolling back a connection left in a transaction" in caplog.text
        assert conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


# -- trouble ---------------------------------------------------------------------------------------


def test_reconnect_failed_is_called_after_reconnect_timeout(
    module_url: str, thread_proxy: FaultProxy
) -> None:
    told: list[object] = []
    called = threading.Event()

    def failed(pool: ConnectionPool) -> None:
        told.append(pool)
        called.set()

    thread_proxy.refuse()
    with ConnectionPool(
        through(thread_proxy, module_url),
        min_size=1,
        reconnect_timeout=0.3,
        reconnect_failed=failed,
    ) as pool:
        assert not called.wait(0.1)
        assert called.wait(5.0)
        assert told == [pool]
        assert pool.reconnect_timeout == 0.3
        # Unlike psycopg_pool it goes on trying, and says so again only when it has worked between.
        thread_proxy.heal()
        pool.wait()
        assert told == [pool]


async def test_reconnect_failed_may_be_async() -> None:
    called = asyncio.Event()

    async def failed(pool: AsyncConnectionPool) -> None:
        await asyncio.sleep(0)
        called.set()

    async with AsyncConnectionPool(
        f"host=127.0.0.1 port={free_port()}",
        min_size=1,
        reconnect_timeout=0.0,
        reconnect_failed=failed,
    ):
        async with asyncio.timeout(PATIENCE):
            await called.wait()


def test_timeout(module_url: str) -> None:
    with ConnectionPool(module_url, min_size=1, timeout=0.02) as pool:
        with pool.connection(timeout=5.0), pytest.raises(PoolTimeout, match=r"within 0\.0 s"):
            pool.getconn()
        # With a timeout of 0, psycopg_pool hands out no connection, not even a ready one.
        pool.putconn(pool.getconn(timeout=0.0))


def test_pop_stats_counts_from_zero(pool: ConnectionPool) -> None:
    pool.wait()
    with pool.connection():
        pass
    popped = pool.pop_stats()
    assert (popped["requests_num"], popped["connections_num"]) == (1, 2)
    after = pool.get_stats()
    assert (after["requests_num"], after["connections_num"], after["pool_size"]) == (0, 0, 2)
