"""The pool for asyncio, on a real server."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from tests.reservoir.support import PATIENCE, eventually_async, through
from tests.servers import free_port
from tests.silent_server import silent_server

from moored.reservoir import (
    AsyncConnectionPool,
    PoolClosed,
    PoolOverloaded,
    PoolTimeout,
    ReservoirConfig,
    _upkeep,
)
from moored.testing import FaultProxy

Pool = AsyncConnectionPool


@pytest.fixture
async def pool(module_url: str) -> AsyncIterator[Pool]:
    """One connection, ready."""
    async with AsyncConnectionPool(module_url, max_size=1, name="shop") as pool:
        await pool.wait()
        yield pool


async def waiting(pool: Pool, number: int = 1) -> None:
    """Until so many callers wait."""
    await eventually_async(lambda: pool.statistics().waiting == number)


# -- order -----------------------------------------------------------------------------------------


async def test_callers_are_served_in_the_order_of_arrival(pool: Pool) -> None:
    served: list[int] = []

    async def caller(number: int) -> None:
        async with pool.connection() as conn:
            served.append(number)
            await conn.execute("select 1")

    async with pool.connection():
        callers = []
        for number in range(20):
            callers.append(asyncio.create_task(caller(number)))
            await waiting(pool, number + 1)
    await asyncio.gather(*callers)
    assert served == list(range(20))


async def test_no_caller_overtakes_the_waiters(pool: Pool) -> None:
    """Not even a caller that comes in the very moment in which a connection comes back."""
    conn = await pool.getconn()
    first = asyncio.create_task(pool.getconn())
    await waiting(pool)
    await pool.putconn(conn)
    with pytest.raises(PoolTimeout):
        await pool.getconn(timeout=0.0)
    await pool.putconn(await first)


async def test_connections_are_used_in_turn(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=3) as pool:
        await pool.wait()
        used = []
        for _ in range(6):
            async with pool.connection() as conn:
                used.append(conn)
        assert used[:3] == used[3:]
        assert len(set(used)) == 3


# -- being cancelled -------------------------------------------------------------------------------


async def test_a_cancelled_caller_leaves_the_queue(pool: Pool) -> None:
    async with pool.connection():
        first, second = (asyncio.create_task(pool.getconn()) for _ in range(2))
        await waiting(pool, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pool.statistics().waiting == 1
    await pool.putconn(await second)
    assert pool.statistics().size == 1


async def test_a_connection_for_a_caller_that_was_just_cancelled_goes_to_the_next(
    pool: Pool,
) -> None:
    """It was handed over, and in the same moment its new holder was cancelled."""
    conn = await pool.getconn()
    first, second = (asyncio.create_task(pool.getconn()) for _ in range(2))
    await waiting(pool, 2)
    await pool.putconn(conn)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second is conn
    await pool.putconn(conn)
    assert pool.statistics().size == 1


async def test_a_connection_for_the_last_caller_that_was_just_cancelled_is_not_lost(
    pool: Pool,
) -> None:
    conn = await pool.getconn()
    only = asyncio.create_task(pool.getconn())
    await waiting(pool)
    await pool.putconn(conn)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    assert pool.statistics().size == 1
    async with pool.connection() as again:
        assert again is conn


async def test_a_cancelled_block_rolls_back(pool: Pool, observer: psycopg.Connection[Any]) -> None:
    observer.execute("create table if not exists cancelled (n int)")
    begun = asyncio.Event()

    async def work() -> None:
        async with pool.connection() as conn:
            await conn.execute("insert into cancelled values (1)")
            begun.set()
            await conn.execute("select pg_sleep(30)")

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with pool.connection(timeout=PATIENCE) as conn:
        assert conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert await (await conn.execute("select count(*) from cancelled")).fetchone() == (0,)


# -- what people read ------------------------------------------------------------------------------


async def test_a_timeout_says_where_all_connections_are(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=2, creation_rate=20, name="shop") as pool:
        await pool.wait()

        async def export() -> None:
            async with pool.connection():
                await asyncio.sleep(30)

        holder = asyncio.create_task(export(), name="export")
        await eventually_async(lambda: pool.statistics().in_use == 1)
        async with pool.connection():
            patient = asyncio.create_task(pool.getconn())
            await waiting(pool)
            with pytest.raises(PoolTimeout) as caught:
                await pool.getconn(timeout=0.1)
        assert re.fullmatch(
            r"shop: no connection within 0\.1 s: 2 of 2 in use, "
            r"1 waiting \(the first for \d\.\d s\); "
            r'longest held \d\.\d s \(checkout of task "export"\); 0 connects in flight, creation '
            r"limited to 20/s",
            str(caught.value),
        )
        await pool.putconn(await patient)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)


async def test_a_timeout_says_why_nothing_could_be_opened() -> None:
    nobody = f"host=127.0.0.1 port={free_port()}"
    async with AsyncConnectionPool(nobody, max_size=2, name="shop") as pool:
        with pytest.raises(PoolTimeout) as caught:
            await pool.getconn(timeout=0.3)
    text = str(caught.value)
    assert text.startswith("shop: no connection within 0.3 s: 0 of 2 in use; ")
    assert re.search(r"connecting has failed for \d\.\d s: .*[Cc]onnection refused", text)


async def test_pool_timeout_is_a_timeout_error(pool: Pool) -> None:
    async with pool.connection():
        for kind in (TimeoutError, psycopg.OperationalError, PoolTimeout):
            with pytest.raises(kind):
                await pool.getconn(timeout=0.0)


async def test_repr(module_url: str) -> None:
    pool = AsyncConnectionPool(module_url, max_size=2)
    place = re.escape(module_url.rpartition("@")[2])
    assert re.fullmatch(rf"<AsyncConnectionPool {place}: new>", repr(pool))
    async with pool:
        await pool.wait()
        async with pool.connection():
            assert re.fullmatch(
                rf"<AsyncConnectionPool {place}: 2 of 2, 1 ready, 1 in use, 0 waiting, "
                r"next expiry in 1\d m \d+ s>",
                repr(pool),
            )
    assert re.fullmatch(rf"<AsyncConnectionPool {place}: closed>", repr(pool))


async def test_a_leak_is_logged_with_the_stack_of_its_checkout(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = ReservoirConfig(max_size=1, scan_every=0.02)
    async with AsyncConnectionPool(module_url, config=config, leak_after=0.05, name="shop") as pool:
        async with pool.connection():
            await eventually_async(lambda: "leak_after" in caplog.text)
            await asyncio.sleep(0.1)
        (record,) = [r for r in caplog.records if "leak_after" in r.getMessage()]
        assert record.levelno == logging.WARNING
        text = record.getMessage()
        assert re.match(
            r"shop: a connection has been in use for 0\.\d s \(leak_after=0\.05 s\)", text
        )
        assert "test_a_leak_is_logged_with_the_stack_of_its_checkout" in text
        assert "async with pool.connection()" in text
        caplog.clear()
        async with pool.connection():
            await eventually_async(lambda: "leak_after" in caplog.text)  # again, for another use


# -- open ------------------------------------------------------------------------------------------


async def test_open_with_wait_waits_for_the_low_watermark(module_url: str) -> None:
    config = ReservoirConfig(max_size=3, low_watermark=2, start_stagger=0.0)
    pool: Pool = AsyncConnectionPool(module_url, config=config, open=False)
    await pool.open(wait=True)
    assert pool.statistics().size >= 2
    await pool.close()


async def test_open_with_wait_warns_after_its_timeout_and_reports_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    pool: Pool = AsyncConnectionPool(
        f"host=127.0.0.1 port={free_port()}", max_size=2, name="shop", open=False
    )
    await pool.open(wait=True, timeout=3.0, progress=told.append)
    assert not pool.closed
    text = told[0]
    assert text.startswith("shop: filling, 0 of 2 connections; the last connect failed: ")
    (warning,) = [r.getMessage() for r in caplog.records if "starting anyway" in r.getMessage()]
    assert warning.startswith("shop has 0 of 2 connections after 3 s: ")
    await pool.close()


async def test_concurrent_callers_open_a_pool_once(module_url: str) -> None:
    pool: Pool = AsyncConnectionPool(module_url, max_size=2)

    async def use() -> None:
        async with pool.connection() as conn:
            await conn.execute("select 1")

    await asyncio.gather(*(use() for _ in range(10)))
    await pool.wait()
    assert pool.statistics().refills == 2
    await pool.close()


# -- close -----------------------------------------------------------------------------------------


async def test_waiters_get_pool_closed_when_the_pool_is_closed(pool: Pool) -> None:
    conn = await pool.getconn()
    patient = asyncio.create_task(pool.getconn())
    await waiting(pool)
    await pool.close()
    await pool.close()
    with pytest.raises(PoolClosed, match="shop was closed while this caller waited"):
        await patient
    with pytest.raises(PoolClosed, match="shop is not open: it is closed"):
        await pool.getconn()
    assert not conn.closed
    await pool.putconn(conn)
    await eventually_async(lambda: conn.closed)


async def test_a_block_that_outlives_its_pool_commits(
    pool: Pool, observer: psycopg.Connection[Any]
) -> None:
    observer.execute("create table if not exists outlived (n int)")
    async with pool.connection() as conn:
        await pool.close()
        await conn.execute("insert into outlived values (1)")
    assert observer.execute("select n from outlived").fetchall() == [(1,)]
    await eventually_async(lambda: conn.closed)


async def test_close_ends_in_time_although_a_connect_hangs(
    module_url: str, proxy: FaultProxy
) -> None:
    proxy.stall()
    pool: Pool = AsyncConnectionPool(through(proxy, module_url), max_size=1)
    await pool.open()
    await eventually_async(lambda: proxy.statistics().open == 1)
    began = time.monotonic()
    await pool.close(timeout=1.0)
    assert time.monotonic() - began < 10.0
    proxy.heal()
    await eventually_async(lambda: proxy.statistics().open == 0)


async def test_close_ends_in_time_although_a_connection_does_not_close(
    module_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_upkeep, "CLOSE_PATIENCE", 2.0)
    ended = asyncio.Event()

    async def close(conn: psycopg.AsyncConnection[Any]) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await conn.close()
            ended.set()

    pool: Pool = AsyncConnectionPool(module_url, max_size=1, close_connection=close, name="shop")
    await pool.open(wait=True)
    began = time.monotonic()
    await pool.close(timeout=1.0)
    assert time.monotonic() - began < 10.0
    assert "shop: 1 connection did not close within 1 s" in caplog.text
    await asyncio.wait_for(ended.wait(), PATIENCE)  # it is not left for ever


@pytest.mark.parametrize("closed", [False, True])
async def test_a_broken_return_is_a_warning_only_while_the_pool_is_open(
    pool: Pool, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    caplog.set_level(logging.INFO)
    async with pool.connection() as conn:
        if closed:
            await pool.close(timeout=0.0)
        await conn.close()
    (record,) = [each for each in caplog.records if "that came back broken" in each.message]
    assert record.levelno == (logging.INFO if closed else logging.WARNING)


async def test_a_pool_may_be_closed_by_its_own_callback() -> None:
    closed = asyncio.Event()

    async def give_up(pool: Pool) -> None:
        await pool.close()
        closed.set()

    pool: Pool = AsyncConnectionPool(
        f"host=127.0.0.1 port={free_port()}",
        max_size=1,
        reconnect_timeout=0.0,
        reconnect_failed=give_up,
    )
    began = time.monotonic()
    with pytest.raises(PoolClosed):
        await pool.getconn()
    await asyncio.wait_for(closed.wait(), PATIENCE)
    assert time.monotonic() - began < 10.0


# -- limits ----------------------------------------------------------------------------------------


async def test_too_many_waiting(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=1, max_waiting=2) as pool:
        async with pool.connection():
            patient = [asyncio.create_task(pool.getconn()) for _ in range(2)]
            await waiting(pool, 2)
            with pytest.raises(PoolOverloaded, match=r"2 callers wait already \(max_waiting=2\)"):
                await pool.getconn()
        for caller in patient:
            await pool.putconn(await caller)
        assert pool.statistics().refused == 1


async def test_a_refused_checkout_yields_to_the_event_loop(module_url: str) -> None:
    pool = AsyncConnectionPool(module_url, open=False)
    turn = asyncio.create_task(asyncio.sleep(0))
    for _ in range(3):
        with pytest.raises(PoolClosed):
            await pool.getconn()
    assert turn.done()


async def test_resize(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=1) as pool:
        await pool.wait()
        await pool.resize(3)
        await pool.wait()
        assert (pool.min_size, pool.max_size, pool.statistics().size) == (3, 3, 3)
        held = await pool.getconn()
        await pool.resize(1, 2)
        assert pool.statistics().size == 1
        await pool.resize(1)
        assert pool.statistics().size == 0
        await pool.putconn(held)
        assert pool.statistics().size == 1
        assert pool.statistics().discards == {"reservoir_full": 2}


async def test_drain_replaces_all(module_url: str) -> None:
    async with AsyncConnectionPool(module_url, max_size=2) as pool:
        await pool.wait()
        held = await pool.getconn()
        before = {item.conn for item in pool.reservoir.core.items.values()}
        await pool.drain()
        assert not held.closed
        await held.execute("select 1")
        await held.commit()
        await pool.putconn(held)
        await pool.wait()
        await eventually_async(lambda: all(conn.closed for conn in before))
        assert not before & {item.conn for item in pool.reservoir.core.items.values()}
        assert pool.statistics().discards == {"drained": 2}


async def test_check_replaces_dead_connections_and_keeps_the_others(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    async with AsyncConnectionPool(module_url, max_size=3) as pool:
        await pool.wait()
        first, *others = [item.conn for item in pool.reservoir.core.ready]
        observer.execute("select pg_terminate_backend(%s, 5000)", [first.info.backend_pid])
        await pool.check()
        await pool.wait()
        ready = {item.conn for item in pool.reservoir.core.ready}
        assert first not in ready
        assert ready >= set(others)
        assert pool.get_stats()["connections_lost"] == 1
        assert pool.get_stats()["requests_num"] == 0


async def test_two_pools_to_one_server_share_the_rate(module_url: str, proxy: FaultProxy) -> None:
    """A burst of 5 and 10 a second: 15 connections are not there before a second has passed."""
    url = through(proxy, module_url)
    config = ReservoirConfig(max_size=8, rate=10.0, burst=5, start_stagger=0.0)
    began = time.monotonic()
    async with (
        AsyncConnectionPool(url, config=config) as first,
        AsyncConnectionPool(url, config=config) as second,
    ):
        await asyncio.sleep(0.5)
        seen = proxy.statistics().accepted
        assert seen <= 5 + 10 * (time.monotonic() - began) + 1
        assert seen >= 5
        await asyncio.gather(first.wait(), second.wait())
        assert time.monotonic() - began >= (16 - 5) / 10.0 - 0.1


async def test_a_disabled_reservoir_connects_on_demand(module_url: str, proxy: FaultProxy) -> None:
    config = ReservoirConfig(enabled=False, max_size=2)
    async with AsyncConnectionPool(through(proxy, module_url), config=config) as pool:
        await pool.open(wait=True, timeout=0.0)
        assert proxy.statistics().accepted == 0
        async with pool.connection() as first:
            await first.execute("select 1")
        assert proxy.statistics().accepted == 1
        async with pool.connection() as again, pool.connection() as second:
            assert again is first
            assert second is not first
        assert proxy.statistics().accepted == 2
        assert (pool.min_size, pool.max_size) == (0, 2)


async def test_a_check_that_always_fails_does_not_hammer_the_server(
    module_url: str, proxy: FaultProxy
) -> None:
    """Each failed check would cost a connection: with the rate of 100, thirty in this time."""

    async def check(conn: psycopg.AsyncConnection[Any]) -> None:
        raise psycopg.OperationalError("not good enough")

    url = through(proxy, module_url)
    async with AsyncConnectionPool(url, max_size=1, check=check) as pool:
        began = time.monotonic()
        with pytest.raises(PoolTimeout):
            await pool.getconn(timeout=1.0)
        assert time.monotonic() - began < 10.0
        assert proxy.statistics().accepted < 10
        stats = pool.get_stats()
        assert (stats["requests_num"], stats["requests_errors"]) == (1, 1)


async def test_a_cancelled_connect_closes_its_socket_at_once() -> None:
    async with silent_server() as server:
        conninfo = f"host=127.0.0.1 port={server.port} user=x dbname=x"
        config = ReservoirConfig(max_size=1, connect_timeout=PATIENCE)
        async with AsyncConnectionPool(conninfo, config=config, open=False) as pool:
            await asyncio.wait_for(server.arrived.wait(), PATIENCE)
            await pool.close(timeout=1.0)
            await asyncio.wait_for(server.gone.wait(), 3.0)
