"""What ALTER TABLE does to rows is noticed, or refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.postgres.conftest import MakePostgres, Sql
from tests.postgres.server import until

from moored.postgres import ConfigurationError, Follow, PostgresError, Reset, Rows, Transaction

from .orders import LIMIT, ROWS, column, copied, item_of

ALTERED = {
    "replaced": "alter table orders drop column name; alter table orders add column name text "
    "default 'new'",
    "rewritten": "alter table orders alter column name type text using upper(name)",
    "another collation": 'alter table orders alter column name type text collate "C"',
}


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@pytest.mark.parametrize("case", ALTERED)
async def test_a_column_that_keeps_its_name_and_type_while_its_values_change_is_noticed(
    make: MakePostgres, sql: Sql, case: str
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=5) as follow:
            item = await item_of(follow)
            await sql.execute(ALTERED[case].encode())
            while isinstance(item, Rows):
                assert not follow.progress.complete
                item = await item_of(follow)
            assert isinstance(item, Reset)
            # The copy notices it, and the check of the published tables: one of them is first.
            assert re.search("altered while it was copied|has changed the rows", item.reason)
            assert await copied(follow, resets=True) == list(range(1, ROWS + 1))
        async with pg.snapshot("orders", chunk_rows=5) as snapshot:
            chunks = snapshot.chunks()
            await anext(chunks)
            await sql.execute("alter table orders alter name type text using lower(name)")
            with pytest.raises(PostgresError, match="altered while it was copied"):
                await asyncio.wait_for(collect(chunks), LIMIT)


async def test_a_column_that_is_added_with_a_default_while_it_copies_is_one_reset(
    make: MakePostgres, sql: Sql
) -> None:
    """The copy notices it, and so does the check of the published tables."""
    async with make() as pg, pg.follow("orders", consumer="c", chunk_rows=5) as follow:
        await item_of(follow)
        await sql.execute("alter table orders add extra int default 7")
        await sql.execute("insert into orders values (99)")
        resets, rows = [], list[int]()

        async def deliver(until_id: int) -> None:
            while until_id not in rows:
                item = await item_of(follow)
                if isinstance(item, Reset):
                    resets.append(item.reason)
                    rows.clear()
                elif isinstance(item, Rows):
                    rows.extend(row["id"] for row in item)
                    assert not resets or all(row["extra"] == 7 for row in item)
                else:
                    rows.extend(change.new["id"] for change in item)
                    await item.ack()

        await deliver(99)

        async def checked() -> bool:
            return "extra" in str(pg._hub.tables.of("c"))

        await until(checked)
        await sql.execute("insert into orders values (100)")
        await deliver(100)
        assert len(resets) == 1, resets
        assert sorted(rows) == [*range(1, ROWS + 1), 99, 100]


async def test_without_columns_only_the_key_is_delivered(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        async with pg.snapshot("orders", columns=[]) as snapshot:
            assert (await collect(aiter(snapshot)))[0] == {"id": 1}
        async with pg.follow("orders", consumer="c", columns=[]) as follow:
            assert (await item_of(follow))[0] == {"id": 1}
            await sql.execute("insert into orders values (99, 'new', 1)")
            (change,) = await item_of(follow)
            assert change.new == {"id": 99}


async def test_a_partition_whose_changes_lack_the_key_is_refused(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute(
        "create table parts (id text primary key, code int not null) partition by hash (id); "
        "create table part_1 partition of parts for values with (modulus 2, remainder 0); "
        "create table part_2 partition of parts for values with (modulus 2, remainder 1); "
        "insert into parts select 'key ' || n, n from generate_series(1, 9) n; "
        "create unique index by_code on part_1 (code)"
    )
    change = "alter table part_1 replica identity using index by_code; delete from part_1"
    fixed = "alter table part_1 replica identity full"
    async with make() as pg:
        async with pg.follow("parts", consumer="c", where="code > 0") as follow:
            await (await item_of(follow)).ack()
            await sql.execute(change.encode())
            assert "lacks its key: a partition has another" in (await item_of(follow)).reason
            with pytest.raises(ConfigurationError, match=f"(?i)partition part_1.*run {fixed}"):
                await item_of(follow)
        await sql.execute(fixed.encode())
        async with pg.follow("parts", consumer="c", where="code > 0") as follow:
            assert isinstance(await item_of(follow), Reset)
            ids = await column(sql, "select id from part_2")
            assert await copied(follow) == sorted(ids)


async def test_a_table_whose_changes_are_published_in_part_is_not_followed(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create publication some_rows for table orders where (id > 5)")
    await sql.execute("create publication some_columns for table orders (id, name)")
    await sql.execute(
        "create table sums (id int primary key, twice int generated always as (id * 2) stored); "
        "create publication not_generated for table sums"
    )

    async def refused(table: str, publication: str, why: str, **fitting: Any) -> None:
        async with make(
            manual_publication=True, publication=publication, stream_id=publication
        ) as pg:
            async with pg.follow(table, consumer="c") as follow:
                with pytest.raises(ConfigurationError, match=why):
                    await item_of(follow)
            if fitting:
                async with pg.follow(table, consumer="d", **fitting) as follow:
                    assert isinstance(await item_of(follow), Rows)
            await pg.drop()

    await refused("orders", "some_rows", "row filter.*publication_filters")
    await refused("orders", "some_columns", r"leaves out.*\(price\)", columns=["name"])
    await refused("sums", "not_generated", r"\(twice\).*publish_generated", where="id > 0")


async def test_rows_that_come_or_go_with_a_partition_begin_the_copy_again(
    make: MakePostgres, sql: Sql
) -> None:
    """And a partition that is created empty does not, nor do partitions end a plain stream."""
    await sql.execute(
        "create table parts (id int primary key) partition by range (id); "
        "create table part_1 partition of parts for values from (0) to (20); "
        "create table part_2 partition of parts for values from (20) to (100); "
        "insert into parts select generate_series(1, 39)"
    )

    async def begun_again(follow: Follow, partition: str, copy: list[int]) -> None:
        reset = await item_of(follow)
        assert isinstance(reset, Reset), reset
        assert f"({partition})" in reset.reason
        assert await copied(follow) == copy

    async with make(check_every=0.2) as pg, pg.changes("plain", tables=["parts"]) as plain:
        async with pg.follow("parts", consumer="c") as follow:
            assert await copied(follow) == list(range(1, 40))
            await sql.execute("create table part_3 partition of parts default")
            await sql.execute("insert into parts values (100)")
            await (await item_of(follow)).ack()
            await sql.execute("alter table parts detach partition part_1")
            await begun_again(follow, "part_1", [*range(20, 40), 100])
            await sql.execute(
                "alter table parts attach partition part_1 for values from (0) to (20)"
            )
            await begun_again(follow, "part_1", [*range(1, 40), 100])
            await sql.execute(
                "create table part_0 (id int primary key); insert into part_0 values (-1); "
                "alter table parts attach partition part_0 for values from (-10) to (0)"
            )
            await begun_again(follow, "part_0", [-1, *range(1, 40), 100])
        await sql.execute("drop table part_2")
        async with pg.follow("parts", consumer="c") as follow:
            await begun_again(follow, "part_2", [-1, *range(1, 20), 100])
        await sql.execute("insert into parts values (101)")
        for number in (100, 101):
            txn = await asyncio.wait_for(anext(plain), LIMIT)
            assert isinstance(txn, Transaction)
            assert [change.new for change in txn] == [{"id": number}]
