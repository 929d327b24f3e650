"""Partitioned tables, locked tables, manual publications, and consumers that are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moored.postgres import Changes, ConfigurationError, Insert
from moored.postgres.consume import _publisher

from .conftest import MakePostgres, Sql
from .server import LIMIT, connected, following, ids, one, quicken

PARTITIONED = (
    "create table sales (id int, region text, primary key (id, region)) partition by list (region)",
    "create table sales_north partition of sales for values in ('north')",
    "create table sales_south partition of sales for values in ('south')",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


async def refusal(changes: Changes) -> str:
    with pytest.raises(ConfigurationError) as caught:
        await asyncio.wait_for(anext(changes), LIMIT)
    return str(caught.value)


async def test_a_partitioned_table_is_published_by_its_own_name(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    for statement in PARTITIONED:
        await sql.execute(statement.encode())
    async with make() as pg:
        changes = pg.changes(tables=["sales"])
        others = pg.changes("others", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("insert into sales values (1, 'north'), (2, 'south')")
        await sql.execute("insert into orders values (7, 'x')")
        txn = await following(changes)
        assert ids(txn) == [1, 2]
        assert {change.table for change in txn if isinstance(change, Insert)} == {"sales"}
        # One that is made later belongs to it from the beginning.
        await sql.execute("create table sales_east partition of sales for values in ('east')")
        await sql.execute("insert into sales values (3, 'east')")
        assert ids(await following(changes)) == [3]
        assert ids(await following(others)) == [7]


async def test_a_locked_table_does_not_delay_other_tables(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """Neither other consumers nor writers have to wait."""
    await sql.execute("create table busy (id int primary key)")
    async with make() as pg:
        await pg.wait_until_active(LIMIT)  # with a slot, which would wait for the writer, too
    async with connected(streamed_url) as writer, make() as pg:
        await writer.execute("begin")
        await writer.execute("insert into busy values (1)")
        busy = pg.changes("busy", tables=["busy"])
        orders = pg.changes("orders", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(orders)) == [1]
        for number in range(2, 6):
            async with asyncio.timeout(3 * _publisher.LOCK_PATIENCE):
                await sql.execute("insert into busy values (%s)", (number,))
        await sql.execute("create table late (id int primary key)")
        late = pg.changes("late", tables=["late"])
        await pg.wait_until_published("late", timeout=LIMIT)
        await sql.execute("insert into late values (1)")
        assert ids(await following(late)) == [1]
        await writer.execute("commit")
        await pg.wait_until_published("busy", timeout=LIMIT)
        await sql.execute("insert into busy values (7)")
        assert ids(await following(busy)) == [7]
        assert pg.statistics()["restarts"] == 0


async def test_a_consumer_that_attaches_during_publishing_is_published_too(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute("create table late (id int primary key)")
    publish, came = _publisher.Publisher._publish, list[Changes]()
    async with make() as pg:

        async def meanwhile(*args: Any) -> Any:
            if not came:
                came.append(pg.changes("late", tables=["late"]))
            return await publish(*args)

        monkeypatch.setattr(_publisher.Publisher, "_publish", meanwhile)
        first = pg.changes("first", tables=["orders"])
        await pg.wait_until_published("orders", "late", timeout=LIMIT)
        await sql.execute("insert into late values (1)")
        assert ids(await following(came[0])) == [1]
        await first.aclose()


async def test_a_partition_published_via_its_root_is_refused(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    for statement in PARTITIONED:
        await sql.execute(statement.encode())
    async with make() as pg:
        north = pg.changes("north", tables=["sales_north"])
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("insert into sales values (1, 'north')")
        assert ids(await following(north)) == [1]
        # From now on they come under the name of the whole: who asked for the part is told.
        whole = pg.changes("whole", tables=["sales"])
        await pg.wait_until_published("sales", timeout=LIMIT)
        assert "partition" in await refusal(north)
        await sql.execute("insert into sales values (2, 'north')")
        assert ids(await following(whole)) == [2]
        late = pg.changes("late", tables=["sales_north"])
        assert "sales_north" in await refusal(late)


async def test_tables_missing_in_a_manual_publication_are_refused(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    await sql.execute("create table stock (id int primary key)")
    await sql.execute("create publication by_hand for table orders")
    async with make(manual_publication=True, publication="by_hand") as pg:
        orders = pg.changes("orders", tables=["orders"])
        both = pg.changes("both", tables=["orders", "stock"])
        assert "stock" in await refusal(both)
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(orders)) == [1]


@pytest.mark.parametrize(
    "statement",
    [
        "create view wanted as select * from orders",
        "create unlogged table wanted (id int)",
        "create temporary table wanted (id int)",
        "select 'there is none'",
    ],
)
async def test_tables_that_cannot_be_published_are_refused(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, statement: str
) -> None:
    """Its consumer gets an error, and the others continue."""
    await sql.execute(statement.encode())
    async with make() as pg:
        orders = pg.changes("orders", tables=["orders"])
        assert "wanted" in await refusal(pg.changes("wanted", tables=["wanted"]))
        await pg.wait_until_published("orders", timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(orders)) == [1]
        assert pg.machine.at("running")


async def test_a_publication_of_a_whole_schema(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    name = f"moored_publication_{stream_id}"
    await sql.execute(f"create publication {name} for tables in schema public".encode())
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]
    members = "select count(*) from pg_publication_rel"
    assert await one(sql, members) == 0, "it is published already: nothing is added"


async def test_a_missing_manual_publication_is_fatal(make: MakePostgres, sql: Sql) -> None:
    async with make(manual_publication=True, publication="by_hand") as pg:
        text = await refusal(pg.changes(tables=["orders"]))
        assert 'CREATE PUBLICATION "by_hand"' in text
