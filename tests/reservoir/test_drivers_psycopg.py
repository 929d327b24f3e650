"""psycopg: a lost connection is detected by its socket, and a ping keeps to its timeout."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import psycopg
import pytest
from psycopg import pq
from tests.reservoir.support import eventually, eventually_async, through

from moored.reservoir import AsyncConnectionPool, ConnectionPool, ReservoirConfig
from moored.reservoir import _pool as pool_module
from moored.reservoir._psycopg import AsyncPsycopg, ThreadsPsycopg
from moored.testing import FaultProxy

THREADS = ThreadsPsycopg(psycopg.Connection.connect)
ASYNC = AsyncPsycopg(psycopg.AsyncConnection.connect)
#: How long a ping may take in these tests.
LIMIT = 1.0


def something_to_read(conn: psycopg.Connection[Any]) -> Callable[[], bool]:
    """Whether the socket has unread data."""
    poll = select.poll()
    poll.register(conn.pgconn.socket, select.POLLIN)
    return lambda: bool(poll.poll(0))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A connection that is closed at the end, whatever it is in the middle of."""
    conn = await psycopg.AsyncConnection.connect(url)
    try:
        yield conn
    finally:
        await conn.close()


def test_a_terminated_backend_is_noticed_without_a_round_trip(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    with closing(psycopg.connect(module_url)) as conn:
        assert not THREADS.is_broken(conn)
        observer.execute("select pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
        eventually(something_to_read(conn))
        assert not conn.closed  # psycopg itself knows nothing yet
        assert THREADS.is_broken(conn)
        assert THREADS.is_broken(conn)


def test_a_reset_connection_is_noticed(module_url: str, thread_proxy: FaultProxy) -> None:
    with closing(psycopg.connect(through(thread_proxy, module_url))) as conn:
        thread_proxy.reset()
        eventually(something_to_read(conn))
        assert THREADS.is_broken(conn)


def test_an_unread_notification_does_not_make_a_connection_broken(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    with closing(psycopg.connect(module_url, autocommit=True)) as conn:
        conn.execute("listen news")
        told: list[str] = []
        conn.add_notify_handler(lambda notice: told.append(notice.payload[0]))
        for number in range(5):
            observer.execute("select pg_notify('news', %s)", [str(number) * 1000])
        eventually(something_to_read(conn))
        assert not THREADS.is_broken(conn)
        assert not THREADS.is_broken(conn)
        THREADS.ping(conn, 5.0)
        conn.execute("select 1")
        assert told == ["0", "1", "2", "3", "4"]  # and none of them is lost


def test_a_notification_does_not_hide_the_end(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    with closing(psycopg.connect(module_url, autocommit=True)) as conn:
        conn.execute("listen news")
        observer.execute("select pg_notify('news', 'last')")
        eventually(something_to_read(conn))
        observer.execute("select pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
        eventually(lambda: THREADS.is_broken(conn))


@pytest.mark.parametrize("status", ["INTRANS", "INERROR", "ACTIVE", "UNKNOWN"])
def test_a_busy_connection_is_not_broken(module_url: str, status: str) -> None:
    with closing(psycopg.connect(module_url)) as conn:
        conn.execute("select 1")
        if status == "INERROR":
            with pytest.raises(psycopg.errors.DivisionByZero):
                conn.execute("select 1/0")
        elif status == "ACTIVE":
            conn.pgconn.send_query(b"select 1")
        elif status == "UNKNOWN":
            conn.close()
        assert pq.TransactionStatus(conn.pgconn.transaction_status).name == status
        assert THREADS.is_broken(conn) == (status == "UNKNOWN")
        assert not THREADS.clean(conn)


def test_a_ping_opens_no_transaction(module_url: str) -> None:
    with closing(psycopg.connect(module_url)) as conn:
        THREADS.ping(conn, 5.0)
        assert THREADS.clean(conn)
        assert conn.execute("select 1").fetchone() == (1,)


async def test_a_ping_opens_no_transaction_under_asyncio(module_url: str) -> None:
    async with connected(module_url) as conn:
        await ASYNC.ping(conn, 5.0)
        assert ASYNC.clean(conn)
        assert await (await conn.execute("select 1")).fetchone() == (1,)


def test_a_ping_of_a_silent_server_times_out(module_url: str, thread_proxy: FaultProxy) -> None:
    with closing(psycopg.connect(through(thread_proxy, module_url))) as conn:
        thread_proxy.black_hole()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="no answer to a ping within 1 s"):
            THREADS.ping(conn, LIMIT)
        assert LIMIT <= time.monotonic() - began < 10 * LIMIT
        assert not THREADS.clean(conn)


async def test_a_ping_of_a_silent_server_times_out_under_asyncio(
    module_url: str, proxy: FaultProxy
) -> None:
    async with connected(through(proxy, module_url)) as conn:
        proxy.black_hole()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="no answer to a ping within 1 s"):
            await ASYNC.ping(conn, LIMIT)
        assert LIMIT <= time.monotonic() - began < 10 * LIMIT
        assert not ASYNC.clean(conn)


@pytest.mark.parametrize("how", ["terminated", "closed", "in a pipeline"])
def test_a_ping_of_an_unusable_connection_fails_at_once(
    module_url: str, observer: psycopg.Connection[Any], how: str
) -> None:
    with closing(psycopg.connect(module_url)) as conn:
        if how == "terminated":
            observer.execute("select pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])
        elif how == "closed":
            conn.close()
        else:
            conn.pgconn.enter_pipeline_mode()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            THREADS.ping(conn, 30.0)
        assert time.monotonic() - began < 10.0


# -- in a pool -------------------------------------------------------------------------------------


def test_a_connection_lost_while_idle_is_not_handed_out(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    with ConnectionPool(module_url, max_size=2) as pool:
        pool.wait()
        dead = [item.conn for item in pool.reservoir.core.ready]
        pids = [conn.info.backend_pid for conn in dead]
        unread = [something_to_read(conn) for conn in dead]
        for conn, pid, ended in zip(dead, pids, unread, strict=True):
            observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
            if not conn.closed:  # the pool may have noticed it already
                eventually(ended)
        time.sleep(0.11)  # one that was used a moment ago is handed out without a look
        with pool.connection() as conn:
            assert conn not in dead
            conn.execute("select 1")
        assert pool.get_stats()["connections_lost"] == 2


async def test_the_scanner_replaces_connections_lost_while_idle(
    module_url: str, observer: psycopg.Connection[Any]
) -> None:
    config = ReservoirConfig(max_size=2, scan_every=0.02)
    async with AsyncConnectionPool(module_url, config=config) as pool:
        await pool.wait()
        dead = [item.conn for item in pool.reservoir.core.ready]
        for pid in [conn.info.backend_pid for conn in dead]:
            observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
        await eventually_async(lambda: pool.statistics().refills == 4)
        await pool.wait()
        assert pool.statistics().discards["bad"] == 2
        assert not {item.conn for item in pool.reservoir.core.ready} & set(dead)


def test_check_idle_pings_only_after_that_time(module_url: str, thread_proxy: FaultProxy) -> None:
    """The socket shows nothing: the server has vanished without closing it."""
    pinged: list[object] = []
    with ConnectionPool(
        through(thread_proxy, module_url), max_size=1, check_idle=1.5, ping=pinged.append
    ) as pool:
        with pool.connection() as conn:
            pass
        time.sleep(0.11)
        with pool.connection():
            pass
        assert pinged == []
        time.sleep(1.51)
        with pool.connection():
            assert pinged == [conn]


@pytest.mark.parametrize("check_idle", [None, 100.0])
def test_check_idle_may_be_off(module_url: str, check_idle: float | None) -> None:
    pinged: list[object] = []
    with ConnectionPool(module_url, max_size=1, check_idle=check_idle, ping=pinged.append) as pool:
        with pool.connection():
            pass
        time.sleep(0.11)
        with pool.connection():
            assert pinged == []


async def test_an_idle_connection_to_a_silent_server_is_replaced(
    module_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "PING_TIMEOUT", LIMIT)
    url = through(proxy, module_url)
    async with AsyncConnectionPool(url, max_size=1, check_idle=0.1) as pool:
        async with pool.connection() as first:
            pass
        await asyncio.sleep(0.11)
        proxy.black_hole()
        began = time.monotonic()
        waiting = asyncio.create_task(pool.getconn(timeout=30.0))
        await eventually_async(lambda: pool.statistics().discards.get("failed_check"))
        assert time.monotonic() - began < 10 * LIMIT
        proxy.heal()
        second = await waiting
        assert second is not first
        await pool.putconn(second)


def test_an_idle_connection_to_a_silent_server_is_replaced_in_threads(
    module_url: str, thread_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "PING_TIMEOUT", LIMIT)
    url = through(thread_proxy, module_url)
    with ConnectionPool(url, max_size=1, check_idle=0.1) as pool:
        with pool.connection() as first:
            pass
        time.sleep(0.11)
        thread_proxy.black_hole()
        began = time.monotonic()
        healer = threading.Thread(target=heal_when, args=(thread_proxy, pool))
        healer.start()
        with pool.connection(timeout=10.0) as second:
            assert second is not first
        assert time.monotonic() - began >= LIMIT
        healer.join()


def heal_when(proxy: FaultProxy, pool: ConnectionPool) -> None:
    """Lift the fault once the pool has noticed it."""
    eventually(lambda: pool.statistics().discards.get("failed_check"))
    proxy.heal()
