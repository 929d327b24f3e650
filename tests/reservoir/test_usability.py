"""What a new user of a pool relies on: error texts, logs, `repr()`, types and defaults."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from typing import Any

import pg8000.dbapi  # type: ignore[import-untyped]
import psycopg
import pytest

from moored import reservoir
from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolTimeout

NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture
def pg8000_options(postgres: SyncEmbeddedPostgres) -> dict[str, object]:
    """How pg8000 reaches the server: it insists on more rounds of hashing than the others."""
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("set scram_iterations = 4096")
        admin.execute("drop role if exists app")
        admin.execute("create role app login password 'secret'")
    where = {"host": postgres.host, "port": postgres.port, "database": "postgres"}
    return {**where, "user": "app", "password": "secret"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_connection_lost_in_use_is_not_kept_if_the_driver_cannot_tell(
    pg8000_options: dict[str, object],
) -> None:
    with ConnectionPool[Any](
        connect=pg8000.dbapi.connect, kwargs=pg8000_options, max_size=1
    ) as pool:
        with pytest.raises(pg8000.dbapi.InterfaceError), pool.connection() as conn:
            conn.cursor().execute("select pg_terminate_backend(pg_backend_pid())")
        with pool.connection() as conn:
            conn.cursor().execute("select 1")
        assert pool.statistics().discards == {"bad": 1}
        del conn
    gc.collect()  # pg8000 leaves a buffer behind that complains, here and not in another test


def test_an_error_in_a_query_keeps_the_connection(
    pg8000_options: dict[str, object],
) -> None:
    with ConnectionPool[Any](
        connect=pg8000.dbapi.connect, kwargs=pg8000_options, max_size=1
    ) as pool:
        with pytest.raises(pg8000.dbapi.DatabaseError), pool.connection() as conn:
            conn.cursor().execute("select nonsense")
        assert pool.statistics().discards == {}


def test_repr_shows_a_server_that_is_given_in_kwargs() -> None:
    where = {"host": "db", "port": 6432, "dbname": "orders", "user": "app", "password": "secret"}
    assert repr(ConnectionPool(kwargs=where, open=False)) == "<ConnectionPool db:6432/orders: new>"
    unknown = ConnectionPool[Any](connect=lambda: object(), name="mine", open=False)
    assert repr(unknown) == "<ConnectionPool mine: new>"


async def test_open_with_wait_also_waits_if_the_pool_is_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncConnectionPool(NOBODY, max_size=1) as pool:
        await pool.open(wait=True, timeout=0.01)
    assert "has 0 of 1 connections after 0.01 s" in caplog.text
    assert "starting anyway" in caplog.text


async def test_check_connection_is_accepted_as_check(postgres_url: str) -> None:
    async with AsyncConnectionPool(
        postgres_url, check=AsyncConnectionPool.check_connection, max_size=1, num_workers=2
    ) as pool:
        assert pool.config.max_in_flight == 2
        async with pool.connection() as conn:
            dead = conn
        dead.pgconn.finish()
        async with pool.connection() as conn:
            assert conn is not dead


def test_check_connection_is_accepted_as_check_in_threads(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as conn:
        ConnectionPool.check_connection(conn)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with pytest.raises(psycopg.OperationalError):
        ConnectionPool.check_connection(conn)


def test_a_leak_is_logged_with_the_name_of_its_thread(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "leak_after" in record.getMessage():
                told.set()

    listener = Listener()
    logging.getLogger("moored.reservoir").addHandler(listener)
    try:
        with (
            ConnectionPool(postgres_url, max_size=1, leak_after=0.01) as pool,
            pool.connection(),
        ):
            assert told.wait(10)
    finally:
        logging.getLogger("moored.reservoir").removeHandler(listener)
    assert f'checkout of thread "{threading.current_thread().name}", at:' in caplog.text
    assert "test_usability.py" in caplog.text


def test_errors_are_named_by_the_public_module() -> None:
    for name in reservoir.__all__:
        public = getattr(reservoir, name)
        if isinstance(public, type) and issubclass(public, Exception):
            assert public.__module__ == "moored.reservoir"
            assert getattr(reservoir, public.__qualname__) is public  # `name` may be a second one
    assert issubclass(PoolTimeout, TimeoutError)


def test_a_pool_that_is_not_closed_ends_without_output(postgres_url: str) -> None:
    program = (
        "from moored.reservoir import ConnectionPool\n"
        f"pool = ConnectionPool({postgres_url!r}, max_size=2)\n"
        "with pool.connection() as conn:\n"
        "    conn.execute('select 1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_type_checkers_see_psycopgs_connections() -> None:
    """Looked at by mypy: what users of psycopg_pool need not say, they need not say here."""
    pool = ConnectionPool(NOBODY, open=False)
    known: ConnectionPool[psycopg.Connection] = pool
    assert known is pool
