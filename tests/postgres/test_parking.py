"""Parked transactions and events are those that were parked, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from moored.postgres import (
    ConfigurationError,
    Outbox,
    OutboxEvent,
    Parking,
    PostgresError,
    Reset,
    Rows,
    Transaction,
)
from moored.postgres.parking import list_parked, parking_ddl, parking_grants, retry_parked
from moored.reservoir import AsyncConnectionPool

from .conftest import MakePostgres, Sql

LIMIT = 60.0
FAILED = ValueError("the order has no item")

#: One transaction with values of own types, every kind of change, and a column that is added.
TRANSACTION = """
begin;
insert into orders values (1, 'tea'), (2, null);
insert into lines values (1, '{1,2}', 'new', '{"a": [1]}', now());
update orders set name = 'jam' where id = 1;
delete from orders where id = 2;
alter table lines add column note text;
alter type state add value 'returned';
insert into lines values (2, null, 'paid', null, null, 'late');
select pg_logical_emit_message(true, 'hint', 'x');
truncate orders, others;
commit
"""


async def first_transaction(items: Any) -> Transaction:
    async with asyncio.timeout(LIMIT):
        while isinstance(item := await anext(items), Reset):
            pass
    assert isinstance(item, Transaction)
    return item


async def retried(parking: Parking[Any], sql: Sql) -> Any:
    """Ask for a retry of the only item, as an operator does, and return the item."""
    (parked,) = await parking.items()
    await retry_parked(sql, [parked.id])
    claimed = await parking.claim()
    assert claimed is not None
    assert claimed[0] == parked.id
    assert await parking.claim() is None
    return claimed[1]


async def test_a_parked_transaction_is_the_same_after_a_restart(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create type state as enum ('new', 'paid')")
    await sql.execute("create table others (id int primary key)")
    await sql.execute(
        "create table lines (id int primary key, n int[], s state, j jsonb, t timestamptz)"
    )
    async with make(messages=True, binary=True) as pg:
        async with pg.changes("search", tables=["orders", "lines"]) as items:
            await pg.wait_until_published()
            await sql.execute(TRANSACTION.encode())
            item = await first_transaction(items)
            parking = Parking.of(pg, "search")
            await parking.prepare()
            await parking.park(item, FAILED)
            await item.ack()
        found, of = list(item), (item.xid, item.position, item.commit_time, len(item))
        (parked,) = await parking.items()
        assert parked.what.endswith("public.lines, public.orders")
        assert parked.error == "the order has no item (ValueError)"
    async with make(messages=True, binary=True) as pg:
        await pg.wait_until_active(LIMIT)
        again = await retried(Parking.of(pg, "search"), sql)
        assert (again.xid, again.position, again.commit_time, len(again)) == of
        assert list(again) == found
        line = found[2].new
        assert line is not None
        assert line["s"] == "new"
        await again.ack()  # without an effect


async def test_an_item_that_is_too_large_is_refused(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg, pg.changes("search", tables=["orders"]) as items:
        await pg.wait_until_published()
        await sql.execute("insert into orders values (1, repeat('x', 65 * 1048576))")
        item = await first_transaction(items)
        parking = Parking.of(pg, "search")
        await parking.prepare()
        with pytest.raises(PostgresError, match="has more than 64 MB: it cannot be parked"):
            await parking.park(item, FAILED)
        assert await parking.items() == []


async def test_an_item_of_a_follower_is_refused(make: MakePostgres, sql: Sql) -> None:
    """Its changes, and its position, have a meaning only in the order of the copy."""
    async with make() as pg, pg.follow("orders", consumer="copy") as items:
        parking: Parking[Any] = Parking.of(pg, "copy")
        await parking.prepare()
        rows = await asyncio.wait_for(anext(items), LIMIT)
        assert isinstance(rows, Rows)
        await rows.ack()
        await sql.execute("insert into orders values (1, 'tea')")
        for item in (rows, await first_transaction(items)):
            with pytest.raises(ConfigurationError, match=r"an item of follow\(\) has its meaning"):
                await parking.park(item, FAILED)
        assert await parking.items() == []


async def test_a_transaction_that_was_spilled_to_a_file_can_be_parked(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg, pg.changes("search", tables=["orders"]) as items:
        await pg.wait_until_published()
        await sql.execute(
            "insert into orders select n, repeat('x', 1048576) from generate_series(1, 20) n"
        )
        item = await first_transaction(items)
        parking = Parking.of(pg, "search")
        await parking.prepare()
        await parking.park(item, FAILED)
        again = await retried(parking, sql)
        assert [change.new and change.new["id"] for change in again] == list(range(1, 21))


async def test_consumers_of_one_name_on_two_streams_have_their_own_items(
    make: MakePostgres, sql: Sql, stream_id: str
) -> None:
    async with (
        make() as pg,
        make(stream_id=f"{stream_id}_b") as other,
        pg.changes("search", tables=["orders"]) as items,
    ):
        await pg.wait_until_published()
        await sql.execute("insert into orders values (1)")
        item = await first_transaction(items)
        here, there = Parking.of(pg, "search"), Parking.of(other, "search")
        await asyncio.gather(here.prepare(), here.prepare())
        for _ in range(2):  # a process that was killed before the acknowledgement parks it again
            await here.park(item, FAILED, tries=2)
        assert [each.tries for each in await here.items()] == [4]
        await other.wait_until_active(LIMIT)
        assert await there.items() == []
        assert [each.source for each in await list_parked(sql)] == [f"stream {stream_id}"]


async def test_a_parked_event_is_the_same_and_its_acknowledgement_has_no_effect(
    streamed_url: str, sql: Sql
) -> None:
    async with Outbox(streamed_url, install=True) as outbox:
        await outbox.publish(sql, "mail", {"to": "ann"}, tenant="acme")
        async with outbox.consume("mailer") as events, asyncio.timeout(LIMIT):
            event = await anext(events)
            assert isinstance(event, OutboxEvent)
            parking = Parking.of(outbox, "mailer")
            await parking.prepare()
            await parking.park(event, FAILED)
        again = await retried(parking, sql)
        assert (again.cursor, again.tenant, again.channel) == (event.cursor, "acme", "mail")
        assert (again.json(), again.at) == ({"to": "ann"}, event.at)
        await again.ack()
        await again.ack(sql)
        await parking.failed((await parking.items())[0].id, OSError("no mail\0 server"))
        (parked,) = await parking.items()
        assert (parked.error, parked.tries) == ("no mail\\0 server (OSError)", 2)
        await parking.remove(parked.id)
        assert await parking.items() == []


@pytest.mark.parametrize("source", [str, AsyncConnectionPool], ids=["url", "pool"])
async def test_a_role_without_rights_is_told_the_command_that_grants_them(
    source: Callable[[str], Any], streamed_url: str, sql: Sql
) -> None:
    role = f"clerk_{streamed_url.rpartition('/')[2]}"
    await sql.execute(f"create role {role} login password 'clerk'".encode())
    url = streamed_url.replace("//postgres:", f"//{role}:").replace(":initdb-once@", ":clerk@")
    try:
        async with AsyncExitStack() as stack:
            if isinstance(used := source(url), AsyncConnectionPool):
                await stack.enter_async_context(used)
            outbox = await stack.enter_async_context(Outbox(used, retain=None))
            parking = Parking.of(outbox, "mailer")
            wanted = f"run `moored consumers install --grant {role}` as an owner"
            with pytest.raises(ConfigurationError, match=wanted):
                await parking.prepare()
            await sql.execute(parking_ddl().encode())
            with pytest.raises(ConfigurationError, match=wanted):
                await parking.prepare()
            await sql.execute(parking_grants(role).encode())
            await parking.prepare()
            assert await parking.items() == []
            await sql.execute(f"revoke all on moored.parked from {role}".encode())
            with pytest.raises(ConfigurationError, match=wanted):
                await parking.items()
    finally:
        await sql.execute(b"drop schema if exists moored cascade")
        await sql.execute(f"drop owned by {role}; drop role {role}".encode())
