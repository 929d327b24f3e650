"""Other drivers: asyncpg with a real server, any callable with hooks, and unsuitable drivers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
from tests.reservoir.support import eventually, eventually_async, through

from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolTimeout, ReservoirConfig
from moored.reservoir import _pool as pool_module
from moored.testing import FaultProxy

Asyncpg = AsyncConnectionPool[Any]
Things = ConnectionPool["Thing"]


@pytest.fixture
async def pool(module_url: str) -> AsyncIterator[Asyncpg]:
    """A pool of two asyncpg connections, and a table."""
    pool: Asyncpg = AsyncConnectionPool(module_url, connect=asyncpg.connect, max_size=2)
    async with pool:
        await pool.wait()
        yield pool


@pytest.fixture
async def table(pool: Asyncpg) -> AsyncIterator[str]:
    async with pool.connection() as conn:
        await conn.execute("create table things (n int)")
    yield "things"
    async with pool.connection() as conn:
        await conn.execute("drop table things")


def rows(observer: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in observer.execute("select n from things order by n")]


# -- asyncpg ---------------------------------------------------------------------------------------


async def test_the_drivers_own_connection_is_handed_out(pool: Asyncpg) -> None:
    async with pool.connection() as conn:
        assert type(conn) is asyncpg.Connection
        assert await conn.fetchval("select 1") == 1


@pytest.mark.usefixtures("table")
async def test_asyncpg_commits_by_itself(
    pool: Asyncpg, observer: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pool.connection() as conn:
        await conn.execute("insert into things values (1)")
        assert rows(observer) == [1]
        async with conn.transaction():
            await conn.execute("insert into things values (2)")

    async def failing() -> None:
        async with pool.connection() as conn:
            await conn.execute("insert into things values (3)")
            await conn.execute("select 1/0")

    with pytest.raises(asyncpg.DivisionByZeroError):
        await failing()
    assert rows(observer) == [1, 2, 3]
    assert not caplog.records


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("failing", [False, True])
async def test_an_asyncpg_transaction_left_open_is_rolled_back_with_a_warning(
    pool: Asyncpg,
    observer: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    failing: bool,
) -> None:
    conn = await pool.getconn()
    await conn.execute("begin")
    await conn.execute("insert into things values (1)")
    if failing:
        with pytest.raises(asyncpg.DivisionByZeroError):
            await conn.execute("select 1/0")
    await pool.putconn(conn)
    assert "rolling back a connection left in a transaction" in caplog.text
    assert not conn.is_in_transaction()
    assert rows(observer) == []
    assert pool.get_stats()["returns_bad"] == 0


SPOIL = """set time zone 'Asia/Tokyo'; listen news; select pg_advisory_lock(7);
           declare c cursor with hold for select 1"""
SESSION = """select current_setting('TimeZone'), array(select pg_listening_channels()),
             (select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'),
             (select count(*) from pg_cursors where is_holdable)"""


@pytest.mark.every_loop
async def test_an_asyncpg_session_is_reset_when_it_comes_back(module_url: str) -> None:
    pool: Asyncpg = AsyncConnectionPool(module_url, connect=asyncpg.connect, max_size=1)
    async with pool:
        async with pool.connection() as conn:
            as_new = await conn.fetchrow(SESSION)
            await conn.execute(SPOIL)
        async with pool.connection() as conn:
            assert await conn.fetchrow(SESSION) == as_new
        assert pool.statistics().refills == 1


async def test_an_asyncpg_session_is_kept_if_the_reset_is_turned_off(module_url: str) -> None:
    pool: Asyncpg = AsyncConnectionPool(
        module_url, connect=asyncpg.connect, max_size=1, reset=False
    )
    async with pool:
        async with pool.connection() as conn:
            await conn.execute("set time zone 'Asia/Tokyo'")
        async with pool.connection() as conn:
            assert await conn.fetchval("show time zone") == "Asia/Tokyo"


async def test_an_asyncpg_backend_that_ended_is_not_handed_out(
    pool: Asyncpg, observer: psycopg.Connection[Any]
) -> None:
    items = list(pool.reservoir.core.ready)
    for item in items:
        observer.execute("select pg_terminate_backend(%s, 5000)", [item.conn.get_server_pid()])
        await eventually_async(item.conn.is_closed)
    # One that was in use, or opened, just before is handed out without a check.
    await eventually_async(lambda: time.monotonic() >= max(each.fresh_until for each in items))
    async with pool.connection() as conn:
        assert await conn.fetchval("select 1") == 1
    assert pool.statistics().discards["bad"] == 2


async def test_an_asyncpg_connection_that_ended_in_use_is_not_kept(
    pool: Asyncpg, observer: psycopg.Connection[Any]
) -> None:
    async with pool.connection() as conn:
        observer.execute("select pg_terminate_backend(%s, 5000)", [conn.get_server_pid()])
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
            await conn.execute("select 1")
    await pool.wait()
    async with pool.connection() as first, pool.connection() as second:
        assert conn not in (first, second)
    assert pool.get_stats()["returns_bad"] == 1


async def test_an_asyncpg_connection_whose_query_was_cancelled_is_not_reused_busy(
    pool: Asyncpg,
) -> None:
    """asyncpg asks the server to cancel, on another connection; until then it is busy."""
    async with pool.connection() as conn:
        with pytest.raises(TimeoutError):
            await conn.execute("select pg_sleep(30)", timeout=0.05)
    async with asyncio.timeout(20.0):
        for _ in range(4):
            async with pool.connection() as other:
                assert await other.fetchval("select 1") == 1


async def test_an_asyncpg_connection_cancelled_in_its_block(pool: Asyncpg) -> None:
    async def work() -> None:
        async with pool.connection() as conn:
            await conn.execute("begin")
            await conn.execute("select pg_sleep(30)")

    task = asyncio.create_task(work())
    await eventually_async(lambda: pool.statistics().in_use == 1)
    await asyncio.sleep(0.02)  # the query must have begun, which cannot be observed here
    task.cancel()
    async with asyncio.timeout(20.0):
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.wait()
        for _ in range(4):
            async with pool.connection() as conn:
                assert not conn.is_in_transaction()
                assert await conn.fetchval("select 1") == 1


async def test_an_idle_asyncpg_connection_is_pinged(
    module_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "PING_TIMEOUT", 1.0)
    url = through(proxy, module_url)
    pool: Asyncpg = AsyncConnectionPool(url, connect=asyncpg.connect, max_size=1, check_idle=0.1)
    async with pool:
        await pool.wait()
        async with pool.connection() as first:
            pass
        await asyncio.sleep(0.11)  # no longer fresh
        proxy.black_hole()
        began = time.monotonic()
        waiting = asyncio.create_task(pool.getconn())
        await eventually_async(lambda: pool.statistics().discards.get("failed_check"))
        assert time.monotonic() - began < 10 * 1.0
        proxy.heal()
        second = await waiting
        assert second is not first
        await pool.putconn(second)


# -- any callable ----------------------------------------------------------------------------------


class Thing:
    """A connection of which nothing is known."""

    numbers = itertools.count(1)

    def __init__(self, *place: str, **options: Any) -> None:
        self.place = place
        self.options = options
        self.number = next(self.numbers)
        self.calls: list[str] = []
        self.broken = False

    def close(self) -> None:
        self.calls.append("close")


def test_a_connection_may_be_any_object() -> None:
    pool: Things = ConnectionPool("somewhere", connect=Thing, kwargs={"colour": "red"}, max_size=1)
    with pool:
        with pool.connection() as thing:
            assert (thing.place, thing.options) == (("somewhere",), {"colour": "red"})
        with pool.connection() as again:
            assert again is thing
        with pytest.raises(ZeroDivisionError), pool.connection():
            raise ZeroDivisionError
        assert pool.getconn() is thing
        pool.putconn(thing)
        assert thing.calls == []
    assert thing.calls == ["close"]


async def test_a_connection_may_be_any_object_under_asyncio() -> None:
    class Awaited(Thing):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            self.calls.append("close")

    async def connect() -> Awaited:
        await asyncio.sleep(0)
        return Awaited()

    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(connect=connect, max_size=1)
    async with pool, pool.connection() as thing:
        assert thing.place == ()
    assert thing.calls == ["close"]


def test_a_closed_object_is_not_kept() -> None:
    class Closable(Thing):
        closed = False

    pool: ConnectionPool[Closable] = ConnectionPool(connect=Closable, max_size=1)
    with pool:
        with pool.connection() as first:
            first.closed = True
        with pool.connection() as second:
            assert second is not first


def hooks(calls: list[tuple[str, Thing]]) -> dict[str, Any]:
    def is_broken(thing: Thing) -> bool:
        return thing.broken

    def ping(thing: Thing) -> None:
        calls.append(("ping", thing))
        if thing.broken:
            raise ConnectionError("no answer")

    def close(thing: Thing) -> None:
        calls.append(("close", thing))

    return {"is_broken": is_broken, "ping": ping, "close_connection": close}


def test_the_hooks_are_called() -> None:
    calls: list[tuple[str, Thing]] = []
    pool: Things = ConnectionPool(connect=Thing, max_size=1, check_idle=0.1, **hooks(calls))
    with pool:
        with pool.connection() as first:
            pass
        calls.clear()
        time.sleep(0.11)  # no longer fresh
        with pool.connection():
            assert calls == [("ping", first)]
            first.broken = True
        assert pool.get_stats()["returns_bad"] == 1
        with pool.connection() as second:
            assert second is not first
        eventually(lambda: ("close", first) in calls)
    assert ("close", second) in calls
    assert first.calls == second.calls == []


def test_a_connection_that_the_is_broken_hook_reports_is_replaced_while_idle() -> None:
    calls: list[tuple[str, Thing]] = []
    config = ReservoirConfig(scan_every=0.02)
    pool: Things = ConnectionPool(connect=Thing, max_size=1, config=config, **hooks(calls))
    with pool:
        with pool.connection() as first:
            pass
        first.broken = True
        eventually(lambda: ("close", first) in calls)
        assert pool.statistics().discards["bad"] == 1


async def test_hooks_may_be_coroutine_functions() -> None:
    calls: list[str] = []

    async def ping(thing: Thing) -> None:
        await asyncio.sleep(0)
        calls.append("ping")

    async def close(thing: Thing) -> None:
        await asyncio.sleep(0)
        calls.append("close")

    pool: AsyncConnectionPool[Thing] = AsyncConnectionPool(
        connect=Thing, max_size=1, ping=ping, close_connection=close
    )
    async with pool:
        await pool.wait()
        await pool.check()
        assert calls == ["ping"]
    assert calls == ["ping", "close"]


def test_a_hook_closes_a_psycopg_connection_for_good(module_url: str) -> None:
    def close(conn: psycopg.Connection[Any]) -> None:
        conn.close()

    with (
        ConnectionPool(module_url, max_size=1, close_returns=True, close_connection=close) as pool,
        pool.connection() as conn,
    ):
        pass
    assert conn.closed


def test_an_interrupted_connection_is_not_kept() -> None:
    """The rest of an answer would be taken for the answer to the next question."""
    pool: Things = ConnectionPool(connect=Thing, max_size=1)
    with pool:
        with pytest.raises(KeyboardInterrupt), pool.connection() as first:
            raise KeyboardInterrupt
        with pool.connection() as second:
            assert second is not first


# -- the wrong kinds -------------------------------------------------------------------------------


def test_asyncpg_in_a_pool_for_threads_is_refused() -> None:
    with pytest.raises(TypeError, match=r"asyncpg is a driver for asyncio.*AsyncConnectionPool"):
        ConnectionPool("", connect=asyncpg.connect, open=False)


def test_a_coroutine_function_in_a_pool_for_threads_is_refused() -> None:
    async def connect() -> Thing:
        return Thing()

    with pytest.raises(TypeError, match=r"returns an awaitable.*AsyncConnectionPool"):
        ConnectionPool("", connect=connect, open=False)


def test_psycopg_for_threads_in_a_pool_for_asyncio_is_refused() -> None:
    with pytest.raises(TypeError, match=r"psycopg is a driver for threads.*use ConnectionPool"):
        AsyncConnectionPool("", connect=psycopg.Connection.connect, open=False)
    with pytest.raises(TypeError, match=r"psycopg is a driver for threads.*use ConnectionPool"):
        AsyncConnectionPool("", connect=psycopg.connect, open=False)


def test_psycopg_for_asyncio_in_a_pool_for_threads_is_refused() -> None:
    with pytest.raises(TypeError, match=r"psycopg is a driver for asyncio.*AsyncConnectionPool"):
        ConnectionPool("", connect=psycopg.AsyncConnection.connect, open=False)


async def test_a_wrong_driver_found_at_the_first_connection_is_reported_to_waiters(
    module_url: str,
) -> None:
    """A function of the user's says nothing about what it returns; and nothing is left open."""
    opened: list[psycopg.Connection[Any]] = []

    def connect() -> Any:
        opened.append(psycopg.connect(module_url))
        return opened[-1]

    async with AsyncConnectionPool(connect=connect, max_size=1) as pool:
        with pytest.raises(PoolTimeout, match="psycopg is a driver for threads"):
            await pool.getconn(timeout=0.5)
    assert opened
    assert all(conn.closed for conn in opened)


def test_an_awaitable_instead_of_a_connection_is_reported_to_waiters() -> None:
    async def nothing() -> None: ...

    with (
        ConnectionPool(connect=lambda: nothing(), max_size=1) as pool,
        pytest.raises(PoolTimeout, match="returns an awaitable"),
    ):
        pool.getconn(timeout=0.5)
