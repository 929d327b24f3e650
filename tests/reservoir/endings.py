"""The ways in which callers leave a block of `connection()`, after they have written a row."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from tests.reservoir.pair import Connection, Interrupted, Side

__all__ = ["ENDINGS", "Ending"]

Ending = Callable[[Side, Connection, int], object]


def normal(side: Side, conn: Connection, value: int) -> None:
    """Nothing more happens: the row is committed."""


def nothing_open(side: Side, conn: Connection, value: int) -> None:
    conn.commit()


def rolled_back(side: Side, conn: Connection, value: int) -> None:
    conn.rollback()


def raises(side: Side, conn: Connection, value: int) -> None:
    raise ZeroDivisionError


def interrupted(side: Side, conn: Connection, value: int) -> None:
    raise Interrupted


def fails(side: Side, conn: Connection, value: int) -> None:
    conn.execute("select 1/0")


def aborted(side: Side, conn: Connection, value: int) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("select 1/0")


def commit_fails(side: Side, conn: Connection, value: int) -> None:
    side.insert(conn, value)


def pipeline(side: Side, conn: Connection, value: int) -> None:
    with conn.pipeline():
        side.insert(conn, -value)


def pipeline_fails(side: Side, conn: Connection, value: int) -> None:
    with conn.pipeline():
        side.insert(conn, -value)
        conn.execute("select 1/0")


def pipeline_left_open(side: Side, conn: Connection, value: int) -> None:
    side.enter_pipeline(conn)
    side.insert(conn, -value)


def pipeline_left_open_and_raises(side: Side, conn: Connection, value: int) -> None:
    pipeline_left_open(side, conn, value)
    raise ZeroDivisionError


def cursor_left_open(side: Side, conn: Connection, value: int) -> None:
    side.keep(conn.cursor()).execute("select generate_series(1, 10)").fetchone()


def server_cursor_left_open(side: Side, conn: Connection, value: int) -> None:
    side.keep(conn.cursor("left_open")).execute("select generate_series(1, 10)").fetchone()


def busy(side: Side, conn: Connection, value: int) -> None:
    """Leave a statement running.

    An unread `stream()` would be one too, but psycopg waits for its lock for ever.
    """
    conn.pgconn.send_query(b"select pg_sleep(0.01)")


def busy_and_raises(side: Side, conn: Connection, value: int) -> None:
    busy(side, conn, value)
    raise ZeroDivisionError


def transaction_left_open(side: Side, conn: Connection, value: int) -> None:
    side.keep(conn.transaction()).__enter__()
    side.insert(conn, -value)


def autocommit(side: Side, conn: Connection, value: int) -> None:
    conn.commit()
    conn.autocommit = True
    side.insert(conn, -value)


def autocommit_and_raises(side: Side, conn: Connection, value: int) -> None:
    autocommit(side, conn, value)
    raise ZeroDivisionError


def begun_in_autocommit(side: Side, conn: Connection, value: int) -> None:
    autocommit(side, conn, value)
    conn.execute("begin")
    side.insert(conn, value + 1_000_000)


def closed(side: Side, conn: Connection, value: int) -> None:
    conn.close()


def closed_and_raises(side: Side, conn: Connection, value: int) -> None:
    conn.close()
    raise ZeroDivisionError


def terminated(side: Side, conn: Connection, value: int) -> None:
    side.terminate(conn)


def terminated_and_used(side: Side, conn: Connection, value: int) -> None:
    side.terminate(conn)
    conn.execute("select 1")


def terminated_and_noticed(side: Side, conn: Connection, value: int) -> None:
    side.terminate(conn)
    with pytest.raises(psycopg.OperationalError):
        conn.execute("select 1")


#: By name.
ENDINGS: dict[str, Ending] = {
    name: value
    for name, value in sorted(globals().items())
    if getattr(value, "__module__", None) == __name__
}
