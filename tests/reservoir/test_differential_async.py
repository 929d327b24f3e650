"""The pool for asyncio behaves like psycopg_pool's.

The decisions are those of the pools for threads, so this looks at what is asyncio's own: awaiting,
and being cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import psycopg_pool
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql
from tests.reservoir.pair import PATIENCE, SHORT, family
from tests.reservoir.support import eventually_async

from moored import reservoir
from moored.testing import scaled

Connection = psycopg.AsyncConnection[Any]
SAME = (
    "pool_size",
    "pool_available",
    "requests_num",
    "requests_waiting",
    "requests_errors",
    "returns_bad",
)

_numbers = itertools.count(1)


class Side:
    """One pool, its table, and the connections that it has handed out."""

    def __init__(self, kind: Any, url: str, observer: psycopg.Connection[Any], **more: Any) -> None:
        self.table = f"side_{next(_numbers)}"
        self.observer = observer
        query = sql.SQL("create unlogged table {} (n int unique deferrable initially deferred)")
        observer.execute(query.format(sql.Identifier(self.table)))
        self.pool = kind(url, min_size=2, max_size=2, max_waiting=1, open=False, **more)
        self.out: list[Connection] = []
        self.cancelled = 0

    async def insert(self, conn: Connection, value: int) -> None:
        query = sql.SQL("insert into {} values (%s)").format(sql.Identifier(self.table))
        await conn.execute(query, [value])

    def rows(self) -> list[int]:
        query = sql.SQL("select n from {} order by n").format(sql.Identifier(self.table))
        return [row[0] for row in self.observer.execute(query)]

    async def settle(self) -> dict[str, int]:
        async with asyncio.timeout(PATIENCE):
            while True:
                stats: dict[str, int] = self.pool.get_stats()
                in_use = stats["pool_size"] - stats["pool_available"]
                if in_use == len(self.out) and stats["pool_size"] >= stats["pool_min"]:
                    return stats
                await asyncio.sleep(0.001)

    async def begin_to_wait(self) -> asyncio.Task[Connection]:
        """Somebody who wants a connection although all are taken."""
        waiting = asyncio.create_task(self.pool.getconn())
        async with asyncio.timeout(PATIENCE):
            while not self.pool.get_stats()["requests_waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0)  # psycopg_pool has no event for it
        return waiting


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except (Exception, asyncio.CancelledError) as error:
        return f"raised {family(error)}"


# -- what callers do -----------------------------------------------------------------------------


async def getconn(side: Side, value: int) -> object:
    conn = await side.pool.getconn(timeout=PATIENCE if len(side.out) < 2 else SHORT)
    side.out.append(conn)
    return conn.pgconn.transaction_status


async def putconn(side: Side, value: int) -> None:
    if side.out:
        await side.pool.putconn(side.out.pop(0))


async def putconn_twice(side: Side, value: int) -> None:
    """A closed one is taken twice by psycopg_pool, which then has one too many."""
    if side.out and not side.out[0].closed:
        conn = side.out.pop(0)
        await side.pool.putconn(conn)
        await side.pool.putconn(conn)


async def insert(side: Side, value: int) -> None:
    if side.out:
        await side.insert(side.out[0], value)


async def close(side: Side, value: int) -> None:
    if side.out:
        await side.out[0].close()


async def drain(side: Side, value: int) -> None:
    await side.pool.drain()


async def check(side: Side, value: int) -> None:
    await side.pool.check()


async def cancelled_while_waiting(side: Side, value: int) -> object:
    """Whoever was cancelled has nothing, and nothing is lost; ours does not call it an error."""
    side.cancelled += 1
    while len(side.out) < 2:
        await getconn(side, value)
    waiting = await side.begin_to_wait()
    waiting.cancel()
    return await outcome(waiting)


# -- how their blocks end ------------------------------------------------------------------------


async def normal(side: Side, conn: Connection, value: int) -> None:
    """Nothing more happens."""


async def raises(side: Side, conn: Connection, value: int) -> None:
    raise ZeroDivisionError


async def aborted(side: Side, conn: Connection, value: int) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await conn.execute("select 1/0")


async def commit_fails(side: Side, conn: Connection, value: int) -> None:
    await side.insert(conn, value)


async def closed(side: Side, conn: Connection, value: int) -> None:
    await conn.close()


async def pipeline(side: Side, conn: Connection, value: int) -> None:
    async with conn.pipeline():
        await side.insert(conn, -value)


async def terminated(side: Side, conn: Connection, value: int) -> None:
    side.observer.execute("select pg_terminate_backend(%s, 5000)", [conn.info.backend_pid])


async def cancelled_in_a_query(side: Side, conn: Connection, value: int) -> None:
    """The server must be running the query: it ignores a cancellation that comes before."""
    running = "select 1 from pg_stat_activity where pid = %s and state = 'active' and query = %s"
    observed = [conn.info.backend_pid, sleep := "select pg_sleep(60)"]

    async def cancel(task: asyncio.Task[object]) -> None:
        await eventually_async(lambda: side.observer.execute(running, observed).fetchone())
        task.cancel()

    task = asyncio.current_task()
    assert task is not None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(cancel(task))
        await conn.execute(sleep)


def block(ending: Callable[[Side, Connection, int], Awaitable[None]]) -> Any:
    """A block that writes a row and then ends in this way."""

    async def run(side: Side, value: int) -> object:
        async with side.pool.connection(timeout=PATIENCE if len(side.out) < 2 else SHORT) as conn:
            status = conn.pgconn.transaction_status
            await side.insert(conn, value)
            await ending(side, conn, value)
        return status

    async def in_a_task(side: Side, value: int) -> object:
        return await asyncio.create_task(run(side, value))

    in_a_task.__name__ = f"block_{ending.__name__}"
    return in_a_task


ENDINGS = (
    normal,
    raises,
    aborted,
    commit_fails,
    closed,
    pipeline,
    terminated,
    cancelled_in_a_query,
)
OPERATIONS = (
    getconn,
    putconn,
    putconn_twice,
    insert,
    close,
    drain,
    check,
    cancelled_while_waiting,
    *(block(ending) for ending in ENDINGS),
)


async def play(url: str, operations: list[Any]) -> None:
    with psycopg.connect(url, autocommit=True) as observer:
        theirs = Side(psycopg_pool.AsyncConnectionPool, url, observer)
        ours = Side(
            reservoir.AsyncConnectionPool,
            url,
            observer,
            creation_rate=10_000.0,
            endpoint=f"side-{theirs.table}",
        )
        async with theirs.pool, ours.pool:
            try:
                for value, operation in enumerate(operations, 1):
                    await compare(theirs, ours, operation, value)
            finally:
                for conn in (*theirs.out, *ours.out):
                    await conn.close()


async def compare(theirs: Side, ours: Side, operation: Any, value: int) -> None:
    expected = await outcome(operation(theirs, value))
    found = await outcome(operation(ours, value))
    assert found == expected, f"{operation.__name__}: psycopg_pool {expected}, ours {found}"
    forget_late_ones(theirs.pool)
    stats = [await side.settle() for side in (ours, theirs)]
    for name in ("requests_num", "requests_errors"):
        stats[0][name] += ours.cancelled
    numbers = [{name: each.get(name, 0) for name in SAME} for each in stats]
    assert numbers[0] == numbers[1], f"{operation.__name__}: ours first"
    assert ours.rows() == theirs.rows(), operation.__name__


def forget_late_ones(pool: Any) -> None:
    """Remove expired waiters, which psycopg_pool counts until a connection is returned."""
    for late in [waiter for waiter in pool._waiting if waiter.error]:
        pool._waiting.remove(late)


@settings(
    max_examples=scaled(100, least=4),
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a shorter way to the same failure would take minutes
    suppress_health_check=list(HealthCheck),
)
@given(operations=st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=12))
def test_the_same_operations_have_the_same_outcome(module_url: str, operations: list[Any]) -> None:
    asyncio.run(play(module_url, operations))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_every_single_operation_has_the_same_outcome(module_url: str, operation: Any) -> None:
    await play(module_url, [operation, getconn, operation, putconn, operation])
