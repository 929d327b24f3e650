"""What a copy may be continued with, and what begins it again."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import psycopg
import pytest
from tests.postgres.conftest import MakePostgres, Sql

from moored.kernel import Tasks
from moored.postgres import (
    ConfigurationError,
    Follow,
    Position,
    Postgres,
    PostgresError,
    Reset,
    Rows,
    Transaction,
)

from .mirror import Copy, contents
from .orders import LIMIT, ROWS, column, copied, item_of


async def begun_again(follow: Follow, reason: str) -> list[Any]:
    """Return the ids of the copy that follows a reset."""
    reset = await item_of(follow)
    assert isinstance(reset, Reset), reset
    assert reason in reset.reason
    return await copied(follow)


async def published_snapshot(pg: Postgres, **options: Any) -> str:
    """Copy all rows while the table is published; return where a follower continues."""
    async with pg.snapshot("orders", chunk_rows=20, **options) as snapshot:
        assert len([row async for row in snapshot]) == ROWS
        return str(snapshot.position)


async def test_a_consumer_of_another_table_condition_or_columns_begins_again(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create table bills (id int primary key); insert into bills values (7)")
    other = "another table"
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            assert await copied(follow) == list(range(1, ROWS + 1))
        async with pg.follow("orders", consumer="c", where="id > 48") as follow:
            assert await begun_again(follow, other) == [49, 50]
        async with pg.follow("orders", consumer="c", columns=["name"]) as follow:
            assert isinstance(await item_of(follow), Reset)
            rows = await item_of(follow)
            assert rows[0] == {"id": 1, "name": "order 1"}
            await rows.ack()
        async with pg.follow("bills", consumer="c") as follow:
            assert await begun_again(follow, other) == [7]
        async with pg.follow("bills", consumer="c") as follow:
            await sql.execute("insert into bills values (8)")
            assert isinstance(await item_of(follow), Transaction)


async def test_a_stored_position_belongs_to_one_condition(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            await copied(follow)
            for number in (100, 101):
                await sql.execute("insert into orders values (%s)", (number,))
                txn = await item_of(follow)
                await txn.ack()
            position = txn.position
        async with pg.follow("orders", consumer="c", where="id > 49", start=position) as follow:
            assert await begun_again(follow, "another table") == [50, 100, 101]
        plain = Position(*position.position)  # as of changes(): what was copied is unknown
        async with pg.follow("orders", consumer="c", start=plain) as follow:
            assert len(await begun_again(follow, "another table")) == ROWS + 2
        async with pg.follow("orders", consumer="c", start=str(position)) as follow:
            await sql.execute("insert into orders values (102)")
            (change,) = await item_of(follow)
            assert change.new["id"] == 102


async def test_a_column_that_is_added_to_a_complete_copy_is_in_its_changes(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            await copied(follow)
        await sql.execute("alter table orders add column note text")
        async with pg.follow("orders", consumer="c") as follow:
            await sql.execute("insert into orders values (99, 'new', 1, 'noted')")
            (change,) = await item_of(follow)
            assert change.new["note"] == "noted"


async def test_a_column_that_is_added_to_an_unfinished_copy_begins_it_again(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            await (await item_of(follow)).ack()
        await sql.execute("alter table orders add column note text")
        async with pg.follow("orders", consumer="c", chunk_rows=10) as follow:
            assert await begun_again(follow, "altered since") == list(range(1, ROWS + 1))
        await pg.drop_consumer("c")
        async with pg.follow("orders", consumer="c", chunk_rows=10) as follow:
            item = await item_of(follow)
            await sql.execute("alter table orders add column more text")
            while isinstance(item, Rows):
                item = await item_of(follow)
            assert "altered while it was copied" in item.reason
            assert await copied(follow) == list(range(1, ROWS + 1))


async def test_a_renamed_key_begins_the_copy_again_and_a_renamed_column_is_an_error(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", where="price > 70") as follow:
            await copied(follow)
            await sql.execute("alter table orders rename column id to number")
            await sql.execute("insert into orders values (99, 'new', 80)")
            reset = await item_of(follow)
            assert "lacks the column 'id' of its key: the column was renamed" in reset.reason
            rows = await item_of(follow)
            assert [row["number"] for row in rows] == [47, 48, 49, 50, 99]
        async with pg.follow("orders", consumer="d", columns=["name"]) as follow:
            await (await item_of(follow)).ack()
            await sql.execute("alter table orders rename column name to title")
            await sql.execute("insert into orders values (100, 'new', 80)")
            with pytest.raises(ConfigurationError, match="have no column name: it was renamed"):
                await item_of(follow)


async def test_an_unchanged_large_value_of_a_row_that_was_copied_again_is_not_lost(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """The second reading has the row under its new key; the server does not send the value."""
    await sql.execute(
        "alter table orders alter name set storage external; "
        "update orders set name = repeat('long ', 2000) where id = 1"
    )
    copy = Copy("id")
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            assert isinstance(await item_of(follow), Rows)
        await sql.execute("update orders set id = 0 where id = 1")
        async with pg.follow("orders", consumer="c") as follow:
            for _ in range(2):
                item = await item_of(follow)
                copy.apply(item)
                await item.ack()
    assert not copy.differences(await contents(streamed_url, "orders", "id"))


async def test_a_copy_begins_after_its_table_was_published_again(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """Another consumer has had it published, until an operator has removed it."""
    waits = "select pid from pg_locks where relation = 'orders'::regclass and not granted"
    async with make() as pg, pg.changes("other", tables=["orders"]):
        await pg.wait_until_published("orders", timeout=LIMIT)
        await sql.execute(
            f"alter publication {pg.settings.publication_name} drop table orders".encode()
        )
        async with await psycopg.AsyncConnection.connect(streamed_url) as holder:
            await holder.execute("lock table orders in share mode")  # rows can be read
            async with pg.follow("orders", consumer="c") as follow:
                following = Tasks().start(item_of(follow))
                async with asyncio.timeout(LIMIT):
                    while not await column(sql, waits):  # noqa: ASYNC110 - the server has no event
                        await asyncio.sleep(0.01)
                assert not (await asyncio.wait([following], timeout=0.5))[0]
                await holder.rollback()
                assert len(await following) == ROWS


async def test_a_snapshot_before_the_table_was_published_is_followed_by_a_reset(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        position = await published_snapshot(pg)
        await sql.execute("insert into orders values (99)")  # not in the stream
        async with pg.follow("orders", consumer="c", start=position) as follow:
            assert 99 in await begun_again(follow, "not published")


async def test_a_snapshot_before_the_table_was_published_again_is_followed_by_a_reset(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.changes("other", tables=["orders"]):
            await pg.wait_until_published("orders", timeout=LIMIT)
        position = await published_snapshot(pg)
        publication = pg.settings.publication_name
        await sql.execute(
            f"alter publication {publication} drop table orders; insert into orders values (99); "
            f"alter publication {publication} add table orders".encode()
        )
        async with pg.follow("orders", consumer="c", start=position) as follow:
            assert 99 in await begun_again(follow, "not all the time")


async def test_a_snapshot_before_discarded_transactions_is_followed_by_a_reset(
    make: MakePostgres, sql: Sql
) -> None:
    """Another consumer has received them, and the process was restarted since."""
    async with make() as pg, pg.changes("other", tables=["orders"]) as changes:
        await pg.wait_until_published("orders", timeout=LIMIT)
        position = await published_snapshot(pg)
        await sql.execute("insert into orders values (99)")
        txn = await anext(changes)
        assert isinstance(txn, Transaction)
        await txn.ack()
        query = (
            f"select 1 from pg_replication_slots where slot_name = '{pg.settings.slot_name}' "
            f"and confirmed_flush_lsn >= '{txn.position.lsn}'"
        )
        async with asyncio.timeout(LIMIT):
            while not await column(sql, query):  # noqa: ASYNC110 - the server has no event
                await asyncio.sleep(0.02)
    async with make() as pg, pg.follow("orders", consumer="c", start=position) as follow:
        assert 99 in await begun_again(follow, "discarded")


async def test_a_snapshot_before_the_slot_was_created_again_is_followed_by_a_reset(
    make: MakePostgres, sql: Sql
) -> None:
    """Another process has created it."""
    async with make() as pg:
        async with pg.changes("other", tables=["orders"]):
            await pg.wait_until_published("orders", timeout=LIMIT)
        position = await published_snapshot(pg)
    await sql.execute("select pg_drop_replication_slot(%s)", (pg.settings.slot_name,))
    await sql.execute("insert into orders values (99)")
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
    async with make() as pg, pg.follow("orders", consumer="c", start=position) as follow:
        assert 99 in await begun_again(follow, "older than the replication slot")


async def test_chunks_of_a_continued_snapshot_and_changes_add_up_to_the_table(
    make: MakePostgres, sql: Sql
) -> None:
    """A row of the chunk that was read ahead is deleted, and does not stay."""
    kept: dict[int, Any] = {}
    async with make() as pg:
        async with pg.changes("c", tables=["orders"]):
            await pg.wait_until_published("orders", timeout=LIMIT)
        async with (
            pg.snapshot("orders", chunk_rows=10) as first,
            aclosing(first.chunks()) as chunks,
        ):
            for _ in range(2):
                kept |= {row["id"]: row for row in await anext(chunks)}
                position = str(first.position)
        await sql.execute("delete from orders where id in (5, 25)")
        assert list(kept) == list(range(1, 21))
        async with pg.snapshot("orders", chunk_rows=10, start=position) as second:
            async for rows in second.chunks():
                assert not kept.keys() & {row["id"] for row in rows}
                kept |= {row["id"]: row for row in rows}
            position = str(second.position)
        async with pg.follow("orders", consumer="c", start=position) as follow:
            (change,) = await item_of(follow)
            assert change.old == {"id": 5}
            del kept[5]
    assert list(kept) == await column(sql, "select id from orders order by id")


async def test_a_copy_that_is_begun_by_a_snapshot_is_finished_by_a_follower(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.changes("c", tables=["orders"]):
            await pg.wait_until_published("orders", timeout=LIMIT)
        async with (
            pg.snapshot("orders", chunk_rows=20) as snapshot,
            aclosing(snapshot.chunks()) as chunks,
        ):
            first = [row["id"] for row in await anext(chunks)]
            position = snapshot.position
        async with pg.follow("orders", consumer="c", start=position) as follow:
            item = await item_of(follow)
            assert isinstance(item, Rows)
            assert first + [row["id"] for row in item] == list(range(1, ROWS + 1))


# -- iterators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistent", [False, True], ids=["in chunks", "consistent"])
async def test_a_snapshot_cannot_be_iterated_outside_of_its_block_or_twice(
    make: MakePostgres, sql: Sql, consistent: bool
) -> None:
    idle = (
        "select pid from pg_stat_activity where state like 'idle in transaction%' "
        "and application_name like 'moored%' and datname = current_database()"
    )
    async with make() as pg:
        early = pg.snapshot("orders")
        with pytest.raises(PostgresError, match="is not open"):
            await anext(aiter(early))
        for kind in ("__aiter__", "blocks", "chunks"):
            async with pg.snapshot("orders", chunk_rows=20, consistent=consistent) as snapshot:
                pieces: Any = getattr(snapshot, kind)()
                await anext(pieces)
                with pytest.raises(PostgresError, match="iterated over once"):
                    await anext(aiter(snapshot))
            with pytest.raises(PostgresError, match="iterate inside of `async with`"):
                await anext(pieces)
            assert not snapshot.progress.complete
            async with asyncio.timeout(LIMIT):
                while await column(sql, idle):  # noqa: ASYNC110 - the pool ends it
                    await asyncio.sleep(0.01)
