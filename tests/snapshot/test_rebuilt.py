"""A consumer that stores the position itself, and has none: its copy is new or was deleted."""

from __future__ import annotations

import asyncio
import sqlite3

from examples.mirror_sqlite import keep
from tests.postgres.conftest import MakePostgres, Sql

from moored.postgres import RESUME, Postgres, Rows, Transaction

from .mirror import Copy, contents
from .orders import LIMIT, ROWS, copied, item_of


def new_mirror() -> sqlite3.Connection:
    mirror = sqlite3.connect(":memory:")
    mirror.executescript(
        "create table orders (id integer primary key, item text);"
        "create table progress (position text); insert into progress values (null);"
    )
    return mirror


async def filled(pg: Postgres, mirror: sqlite3.Connection, expected: list[int]) -> None:
    """Run the documented consumer until the mirror has these rows."""
    keeping = asyncio.create_task(keep(pg, mirror))
    try:
        async with asyncio.timeout(LIMIT):
            while [row for (row,) in mirror.execute("select id from orders")] != expected:
                await asyncio.wait([keeping], timeout=0.01)
                assert not keeping.done(), keeping.result()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def test_a_deleted_mirror_of_the_documented_pattern_is_filled_again(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("alter table orders drop price; alter table orders rename name to item")
    everything = list(range(1, ROWS + 1))
    async with make() as pg:
        await filled(pg, new_mirror(), everything)
        await filled(pg, new_mirror(), everything)
        await sql.execute("insert into orders values (99, 'new')")
        await filled(pg, new_mirror(), [*everything, 99])


async def test_no_change_is_applied_twice_after_a_crash_before_the_first_stored_position(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """The chunk was recorded in the state file, and the consumer has no effect of it."""
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=20, start=None) as follow:
            assert isinstance(await item_of(follow), Rows)
        await sql.execute(
            "insert into orders values (-1); update orders set id = 0 where id = 1; "
            "delete from orders where id = 2"
        )
        copy = Copy("id", exact=True)
        async with pg.follow("orders", consumer="c", chunk_rows=20, start=None) as follow:
            await sql.execute("insert into orders values (99)")
            truth = await contents(streamed_url, "orders", "id")
            while not follow.progress.complete or copy.differences(truth):
                copy.apply(await item_of(follow))
    assert not copy.resets


async def test_resume_continues_at_the_place_in_the_state_file(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", start=RESUME) as follow:
            assert await copied(follow) == list(range(1, ROWS + 1))
        async with pg.follow("orders", consumer="c") as follow:
            await sql.execute("insert into orders values (99)")
            assert isinstance(await item_of(follow), Transaction)
        async with pg.changes("other", tables=["orders"], start=RESUME):
            await pg.wait_until_published("orders", timeout=LIMIT)
