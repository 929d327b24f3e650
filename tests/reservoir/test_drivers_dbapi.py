"""Drivers of the Python Database API: pg8000, sqlite3, and a scripted one that fails."""

from __future__ import annotations

import gc
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pg8000.dbapi  # type: ignore[import-untyped]
import psycopg
import pytest
from tests.reservoir.support import eventually

from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolTimeout

Pool = ConnectionPool[Any]

# pg8000 leaves the socket of a lost connection to the garbage collector, and that complains.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def options(module_url: str) -> dict[str, Any]:
    """How pg8000 connects: as a role whose password was hashed as often as it demands."""
    place = urlsplit(module_url)
    with psycopg.connect(module_url, autocommit=True) as admin:
        admin.execute("set scram_iterations = 4096")
        admin.execute("create role pg8000 superuser login password 'secret'")
        admin.execute("create table things (n int unique deferrable initially deferred)")
    return {
        "host": place.hostname,
        "port": place.port,
        "database": place.path[1:],
        "user": "pg8000",
        "password": "secret",
    }


@pytest.fixture
def pg(options: dict[str, Any], observer: psycopg.Connection[Any]) -> Iterator[Pool]:
    """One connection of pg8000, and an empty table."""
    observer.execute("delete from things")
    pool: Pool = ConnectionPool(connect=pg8000.dbapi.connect, kwargs=options, max_size=1)
    with pool:
        pool.wait()
        yield pool
    gc.collect()


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[Pool]:
    """One connection of sqlite3, and an empty table."""
    pool: Pool = ConnectionPool(
        str(tmp_path / "things.db"),
        connect=sqlite3.connect,
        kwargs={"check_same_thread": False},
        max_size=1,
    )
    with pool:
        with pool.connection() as conn:
            conn.execute("create table things (n int)")
        yield pool


@pytest.fixture(params=["pg", "lite"])
def pool(request: pytest.FixtureRequest) -> Pool:
    """Either of them."""
    found: Pool = request.getfixturevalue(request.param)
    return found


def insert(conn: Any, value: int) -> None:
    conn.cursor().execute(f"insert into things values ({value})")


def rows(pool: Pool) -> list[int]:
    with pool.connection() as conn:
        cursor = conn.cursor()
        cursor.execute("select n from things order by n")
        return [row[0] for row in cursor.fetchall()]


def backend(conn: Any) -> int:
    cursor = conn.cursor()
    cursor.execute("select pg_backend_pid()")
    return int(cursor.fetchone()[0])


# -- transactions ----------------------------------------------------------------------------------


def test_a_normal_end_commits(pool: Pool) -> None:
    with pool.connection() as conn:
        insert(conn, 1)
    assert rows(pool) == [1]
    assert pool.statistics().refills == 1


def test_an_exception_rolls_back(pool: Pool) -> None:
    def failing() -> None:
        with pool.connection() as conn:
            insert(conn, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert rows(pool) == []
    assert pool.statistics().refills == 1


def test_an_error_of_the_server_rolls_back_and_keeps_the_connection(pool: Pool) -> None:
    def failing() -> None:
        with pool.connection() as conn:
            insert(conn, 1)
            conn.cursor().execute("insert into nothing values (1)")

    with pytest.raises((pg8000.dbapi.DatabaseError, sqlite3.OperationalError)):
        failing()
    assert rows(pool) == []
    assert pool.statistics().refills == 1


def test_putconn_rolls_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a warning: the driver cannot tell whether there was anything to roll back."""
    conn = pool.getconn()
    insert(conn, 1)
    pool.putconn(conn)
    assert rows(pool) == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_give_back_rolls_back_and_closes_a_connection_that_it_cannot_roll_back(pool: Pool) -> None:
    water = pool.reservoir
    conn = water.try_checkout()
    insert(conn, 1)
    water.give_back(conn)
    assert water.try_checkout() is conn
    conn.commit()
    insert(conn, 2)
    conn.close()
    water.give_back(conn)
    assert rows(pool) == []
    assert pool.statistics().discards == {"bad": 1}


def test_a_failed_commit_is_raised_and_its_connection_kept(
    pg: Pool, observer: psycopg.Connection[Any]
) -> None:
    def failing() -> None:
        with pg.connection() as conn:
            insert(conn, 1)
            insert(conn, 1)

    with pytest.raises(pg8000.dbapi.DatabaseError, match="duplicate key"):
        failing()
    assert rows(pg) == []
    assert pg.statistics().refills == 1


# -- lost connections ------------------------------------------------------------------------------


def test_a_connection_that_ended_in_its_block_is_replaced(
    pg: Pool, observer: psycopg.Connection[Any]
) -> None:
    def lost() -> None:
        with pg.connection() as conn:
            pid = backend(conn)
            observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
            insert(conn, 1)

    with pytest.raises(pg8000.dbapi.InterfaceError, match="network error"):
        lost()
    assert pg.get_stats()["returns_bad"] == 1
    assert rows(pg) == []
    assert pg.statistics().refills == 2


def test_a_connection_that_ended_before_its_commit_is_replaced(
    pg: Pool, observer: psycopg.Connection[Any]
) -> None:
    def lost() -> None:
        with pg.connection() as conn:
            insert(conn, 1)
            observer.execute("select pg_terminate_backend(%s, 5000)", [backend(conn)])

    with pytest.raises(pg8000.dbapi.InterfaceError):
        lost()
    assert rows(pg) == []
    assert pg.statistics().refills == 2


def test_an_error_with_a_shutdown_sqlstate_leads_to_a_ping(
    pg: Pool, observer: psycopg.Connection[Any]
) -> None:
    """pg8000 has no error class for it, and in autocommit its rollback sends no query."""

    def lost() -> None:
        with pg.connection() as conn:
            conn.autocommit = True
            observer.execute("select pg_terminate_backend(%s, 5000)", [backend(conn)])
            raise pg8000.dbapi.DatabaseError({"S": "FATAL", "C": "57P01", "M": "terminating"})

    with pytest.raises(pg8000.dbapi.DatabaseError):
        lost()
    assert pg.get_stats()["returns_bad"] == 1


def test_check_replaces_connections_that_were_lost_while_idle(
    pg: Pool, observer: psycopg.Connection[Any]
) -> None:
    with pg.connection() as conn:
        pid = backend(conn)
    observer.execute("select pg_terminate_backend(%s, 5000)", [pid])
    pg.check()
    assert pg.statistics().discards["failed_check"] == 1
    assert rows(pg) == []


def test_a_closed_connection_is_replaced(pool: Pool) -> None:
    """These drivers report a closed connection only at the commit."""
    refills = pool.statistics().refills

    def closing(error: Exception | None) -> None:
        with pool.connection() as conn:
            conn.close()
            if error is not None:
                raise error

    with pytest.raises((pg8000.dbapi.InterfaceError, sqlite3.ProgrammingError)):
        closing(None)
    with pytest.raises(ZeroDivisionError):
        closing(ZeroDivisionError())
    assert rows(pool) == []
    assert pool.statistics().refills == refills + 2


def test_all_are_closed_at_the_end(tmp_path: Path) -> None:
    pool: Pool = ConnectionPool(
        str(tmp_path / "empty.db"),
        connect=sqlite3.connect,
        kwargs={"check_same_thread": False},
        max_size=2,
    )
    with pool, pool.connection() as first, pool.connection() as second:
        pass
    for conn in (first, second):
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            conn.execute("select 1")


# -- a scripted driver that fails ------------------------------------------------------------------


class Plain:
    """psycopg with little more than what PEP 249 demands, as psycopg2 has it."""

    def __init__(self, url: str) -> None:
        self.real = psycopg.connect(url)
        self.closed = False
        self.asked: list[str] = []

    def cursor(self) -> Any:
        return self.real.cursor()

    def commit(self) -> None:
        self.asked.append("commit")
        self.real.commit()

    def rollback(self) -> None:
        self.asked.append("rollback")
        self.real.rollback()

    def close(self) -> None:
        self.closed = True
        self.real.close()


@pytest.fixture
def plain(module_url: str) -> Iterator[ConnectionPool[Plain]]:
    pool: ConnectionPool[Plain] = ConnectionPool(module_url, connect=Plain, max_size=1)
    with pool:
        pool.wait()
        yield pool


def test_a_doubtful_error_in_a_transaction_costs_no_connection(
    plain: ConnectionPool[Plain],
) -> None:
    """The transaction must be rolled back before the question, or the answer is an error."""

    def conflict() -> None:
        with plain.connection() as conn:
            conn.cursor().execute("set statement_timeout = '10ms'")
            conn.cursor().execute("select pg_sleep(10)")

    with pytest.raises(psycopg.OperationalError):
        conflict()
    assert plain.get_stats()["returns_bad"] == 0
    with plain.connection() as conn:
        assert conn.cursor().execute("select 1").fetchone() == (1,)
    assert plain.statistics().refills == 1


def test_an_interrupted_connection_is_closed_without_a_query(
    plain: ConnectionPool[Plain],
) -> None:
    with pytest.raises(KeyboardInterrupt), plain.connection() as conn:
        raise KeyboardInterrupt
    assert conn.asked == []
    eventually(lambda: conn.real.closed)
    assert plain.get_stats()["returns_bad"] == 1


def test_a_commit_that_was_interrupted_closes_the_connection(
    plain: ConnectionPool[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(conn: Plain) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plain, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt), plain.connection() as conn:
        conn.cursor().execute("select 1")
    eventually(lambda: conn.real.closed)


async def test_a_driver_for_threads_is_refused_in_a_pool_for_asyncio(module_url: str) -> None:
    opened: list[Plain] = []

    def connect() -> Plain:
        opened.append(Plain(module_url))
        return opened[-1]

    async with AsyncConnectionPool(connect=connect, max_size=1) as pool:
        with pytest.raises(PoolTimeout, match="DB-API is a driver for threads"):
            await pool.getconn(timeout=0.3)
    assert opened
    assert all(conn.real.closed for conn in opened)
