"""The total order: late commits are never skipped; planted defects are caught."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from moored.postgres.outbox import Outbox, _reader
from moored.testing import mutant

from .conftest import Sql
from .reading import next_event, payloads, transaction

BOUND = "and o.xid < pg_snapshot_xmin(pg_current_snapshot())"
AFTER = "(o.xid, o.id) > (%(xid)s::xid8, %(id)s)"


def changed(*changes: tuple[str, str]) -> str:
    """The statement that reads, with parts of it replaced."""
    query: str = _reader._READ
    for old, new in changes:
        assert old in query
        query = query.replace(old, new)
    return query


#: The order of the page is that of the cursor, and so is the order of the rows.
BY_ID = changed((AFTER, "o.id > %(id)s"), ("order by o.xid, o.id limit", "order by o.id limit"))
UNBOUND = changed((BOUND, ""))
AS_TEXT = changed(
    ("order by o.xid, o.id limit", "order by o.xid::text, o.id limit"),
    ("order by e.xid, e.id", "order by e.xid::text, e.id"),
)


async def commits_out_of_order(url: str, outbox: Outbox, sql: Sql) -> list[str]:
    """What a consumer gets while three transactions commit in another order than they began."""
    found: list[str] = []

    async def read(cursor: str) -> str:
        batch = await outbox.read(cursor)
        found.extend(event.payload for event in batch.events)
        return batch.cursor

    start = (await outbox.read()).cursor
    async with transaction(url) as first, transaction(url) as second, transaction(url) as third:
        await outbox.publish(second, "orders", "second")
        await outbox.publish(first, "orders", "first")
        await outbox.publish(third, "orders", "third")
        await third.commit()
        cursor = await read(start)
        await first.commit()
        cursor = await read(cursor)
        await second.commit()
        await read(cursor)
    return found


async def test_late_commits_are_not_skipped(url: str, outbox: Outbox, sql: Sql) -> None:
    assert await commits_out_of_order(url, outbox, sql) == ["first", "second", "third"]


@pytest.mark.parametrize(("name", "query"), [("id cursor", BY_ID), ("no xmin bound", UNBOUND)])
async def test_a_wrong_cursor_is_caught(
    url: str, outbox: Outbox, sql: Sql, name: str, query: str
) -> None:
    with mutant(_reader, "_READ", query, name=name):
        found = await commits_out_of_order(url, outbox, sql)
    assert found != ["first", "second", "third"]


async def publish_across_a_power_of_ten(outbox: Outbox, sql: Sql) -> None:
    """Publish 12 events while the transaction IDs get one more digit."""
    await sql.execute("set synchronous_commit = off")
    row = await (await sql.execute("select pg_current_xact_id()::text::int8")).fetchone()
    assert row is not None
    rest = 10 ** len(str(row[0])) - row[0] - 6
    await sql.execute(
        f"do $$ begin for i in 1..{rest} loop perform pg_current_xact_id(); commit; end loop; "
        "end $$".encode()
    )
    for number in range(12):
        await outbox.publish(sql, "orders", str(number))


async def in_pages(outbox: Outbox) -> list[str]:
    """What a reader gets in pages of three."""
    found, cursor = [], None
    for _ in range(6):
        batch = await outbox.read(cursor, limit=3)
        cursor = batch.cursor
        found += [event.payload for event in batch.events]
    return found


async def test_transaction_ids_are_ordered_as_numbers(outbox: Outbox, sql: Sql) -> None:
    await publish_across_a_power_of_ten(outbox, sql)
    expected = [str(number) for number in range(12)]
    assert await in_pages(outbox) == expected
    with mutant(_reader, "_READ", AS_TEXT, name="text order of xid"):
        assert await in_pages(outbox) != expected


async def test_events_are_delivered_once_the_older_transaction_ends_without_a_wake_up(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    async with outbox.consume("search") as events, transaction(url) as older:
        await outbox.publish(sql, "orders", "newer")
        waiting = asyncio.ensure_future(next_event(events))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done, "an older transaction may still publish"
        await older.rollback()
        assert (await waiting).payload == "newer"


async def test_a_reader_does_not_hold_events_back(url: str, outbox: Outbox, sql: Sql) -> None:
    async with await psycopg.AsyncConnection.connect(url) as idle:
        await idle.execute("select 1")
        await outbox.publish(sql, "orders", "now")
        assert [event.payload for event in (await outbox.read()).events] == ["now"]


async def test_the_order_of_a_transaction_is_that_of_its_statements(
    outbox: Outbox, sql: Sql
) -> None:
    async with sql.transaction():
        for number in range(20):
            await outbox.publish(sql, "orders", str(number))
    async with outbox.consume("search") as events:
        assert await payloads(events, 20) == [str(number) for number in range(20)]
