"""A consumer that stores the position itself, and has none: its copy is new or was deleted."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
from examples.mirror_sqlite import keep
from tests.postgres.conftest import MakePostgres, Sql

from moored.postgres import RESUME, Lsn, Postgres, Rows, Transaction
from moored.postgres.manage import _manager

from .mirror import Copy, contents
from .orders import LIMIT, ROWS, column, copied, item_of


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


async def test_a_mirror_that_is_restored_from_a_backup_gets_no_row_twice(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position is that of a copy which is not finished, and the consumer was further."""
    monkeypatch.setattr(_manager, "REWIND_EVERY", 1.5)
    async with make() as pg:
        slow = pg.changes("slow", tables=["orders"])  # the server keeps what it has not got
        async with pg.changes("c", tables=["orders"]):
            await pg.wait_until_published(timeout=LIMIT)
            await sql.execute("insert into orders values (-1)")
            await sql.execute("insert into orders values (-2)")
        restored = Copy("id", exact=True)
        async with pg.follow("orders", consumer="c", chunk_rows=20, start=None) as follow:
            first = await item_of(follow)
            restored.apply(first)
            await first.ack()
            (limit,) = await column(sql, "select pg_current_wal_insert_lsn()::text")
            number = 100
            while not follow.progress.complete or pg._hub.stored("c") < Lsn.parse(limit):
                if follow.progress.complete:
                    await sql.execute("insert into orders values (%s)", (number,))
                    number += 1
                await (await item_of(follow)).ack()
        # The next stream must not begin before the copy has continued.
        at = first.position.position
        async with pg.changes("other", tables=["orders"], start=at) as other:
            await asyncio.wait_for(anext(other), LIMIT)
        start = str(first.position)
        async with pg.follow("orders", consumer="c", chunk_rows=20, start=start) as follow:
            while (-3,) not in restored.rows:
                item = await item_of(follow)
                restored.apply(item)
                await item.ack()
                if isinstance(item, Rows) and follow.progress.complete:
                    await sql.execute("insert into orders values (-3)")
        assert not restored.resets
        assert slow.name == "slow"


async def test_rows_that_are_acknowledged_after_a_drop_do_not_continue_the_copy(
    make: MakePostgres, sql: Sql
) -> None:
    """Changes between the drop and the next follower would be missed."""
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            rows = await item_of(follow)
            await pg.drop_consumer("c")
            await rows.ack()
        await sql.execute("insert into orders values (99)")
        async with pg.follow("orders", consumer="c") as follow:
            assert await copied(follow) == [*range(1, ROWS + 1), 99]


async def test_rows_of_an_earlier_follower_do_not_overwrite_the_state_of_the_next(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            rows = await item_of(follow)
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            assert await copied(follow) == list(range(1, ROWS + 1))
        await rows.ack()
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            await sql.execute("insert into orders values (99)")
            assert isinstance(await item_of(follow), Transaction)
