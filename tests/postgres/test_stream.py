"""Changes, from a commit to a consumer, against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from moored.postgres import Changes, Position, Postgres, PostgresError, Reset, Transaction
from moored.postgres.server import _admin
from moored.postgres.server._setup import Setup
from moored.postgres.stream._link import ReplicationLink

from .conftest import MakePostgres, Sql

LIMIT = 20.0


async def following(changes: Changes) -> Transaction:
    """The next transaction; a reset is a failure of the test."""
    item = await asyncio.wait_for(anext(changes), LIMIT)
    assert isinstance(item, Transaction), item
    return item


def ids(txn: Transaction) -> list[int]:
    return [change.new["id"] for change in txn if change.new is not None]


async def published(pg: Postgres, table: str = "orders") -> None:
    """Wait until the table is in the publication: earlier changes are not received."""
    await pg.wait_until_active(LIMIT)
    async with asyncio.timeout(LIMIT):
        while True:
            async with pg.connection() as conn:
                rows = await conn.execute(
                    "select 1 from pg_publication_rel where prrelid = %s::regclass", (table,)
                )
                if await rows.fetchone():
                    return
            await asyncio.sleep(0.01)


async def confirmed(sql: Sql, pg: Postgres) -> Any:
    rows = await sql.execute(
        "select confirmed_flush_lsn from pg_replication_slots where slot_name = %s",
        (pg.settings.slot_name,),
    )
    row = await rows.fetchone()
    return None if row is None else row[0]


async def until_confirmed(sql: Sql, pg: Postgres, lsn: object) -> None:
    async with asyncio.timeout(LIMIT):
        while True:
            if (await confirmed(sql, pg)) == str(lsn):
                return
            await asyncio.sleep(0.02)


async def test_a_commit_reaches_the_consumer(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        async with pg.connection() as conn:
            await conn.execute("insert into orders values (1, 'a'), (2, 'b')")
        txn = await following(changes)
        assert [(c.kind, c.table, c.new) for c in txn] == [
            ("insert", "orders", {"id": 1, "name": "a"}),
            ("insert", "orders", {"id": 2, "name": "b"}),
        ]


async def test_only_acknowledged_transactions_are_confirmed(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        await sql.execute("insert into orders values (2, 'b')")
        first, second = await following(changes), await following(changes)
        await second.ack()
        await asyncio.sleep(0.5)  # longer than progress takes to be told
        before = await confirmed(sql, pg)
        assert before < str(first.position.lsn)
        await first.ack()
        await until_confirmed(sql, pg, second.position.lsn)


async def test_a_new_process_gets_unacknowledged_transactions_again(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        await sql.execute("insert into orders values (2, 'b')")
        await (await following(changes)).ack()
        assert ids(await following(changes)) == [2]
    await sql.execute("insert into orders values (3, 'c')")
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        assert ids(await following(changes)) == [2]
        assert ids(await following(changes)) == [3]


async def test_attaching_again_gets_unacknowledged_transactions_again(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.changes("search", tables=["orders"]) as changes:
            await published(pg)
            await sql.execute("insert into orders values (1, 'a')")
            assert ids(await following(changes)) == [1]
        again = pg.changes("search", tables=["orders"])
        txn = await following(again)
        assert ids(txn) == [1]
        await txn.ack()


async def test_the_slowest_consumer_retains_the_wal(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        slow, quick = pg.changes("slow", tables=["orders"]), pg.changes("quick", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        of_slow, of_quick = await following(slow), await following(quick)
        await of_quick.ack()
        await asyncio.sleep(0.5)  # longer than progress takes to be told
        assert (await confirmed(sql, pg)) < str(of_slow.position.lsn)
        assert pg.statistics()["consumers"]["slow"]["outstanding"] == 1
        await of_slow.ack()
        await until_confirmed(sql, pg, of_slow.position.lsn)


async def test_each_consumer_gets_its_own_tables(make: MakePostgres, sql: Sql) -> None:
    await sql.execute("create table other (id int primary key)")
    async with make() as pg:
        orders = pg.changes("orders", tables=["orders"])
        everything = pg.changes("everything", tables=["orders", "public.other"])
        await published(pg)
        await published(pg, "other")
        await sql.execute("insert into other values (7)")
        async with sql.transaction():
            await sql.execute("insert into other values (8)")
            await sql.execute("insert into orders values (1, 'a')")
        assert ids(await following(everything)) == [7]
        assert ids(await following(everything)) == [8, 1]
        assert ids(await following(orders)) == [1]


async def test_a_consumer_continues_at_its_start_position(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("ledger", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        await sql.execute("insert into orders values (2, 'b')")
        first = await following(changes)
        kept = str(first.position)
        assert Position.parse(kept) == first.position
    async with make() as pg:
        changes = pg.changes("ledger", tables=["orders"], start=kept)
        assert ids(await following(changes)) == [2]


async def test_a_position_of_another_history_is_a_reset(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        changes = pg.changes("ledger", start="123456789/1/0/15")
        item = await asyncio.wait_for(anext(changes), LIMIT)
        assert isinstance(item, Reset)
        assert "another history" in item.reason


async def test_a_consumer_name_can_be_attached_once_at_a_time(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search")
        with pytest.raises(PostgresError, match="give each its own name"):
            pg.changes("search")
        await changes.aclose()
        await pg.changes("search").aclose()


async def test_a_quiet_table_does_not_retain_wal(make: MakePostgres, sql: Sql) -> None:
    await sql.execute("create table unheard (id int)")
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        for number in range(20):
            await sql.execute("insert into unheard values (%s)", (number,))
        row = await (await sql.execute("select pg_current_wal_lsn()")).fetchone()
        assert row is not None
        async with asyncio.timeout(LIMIT):
            while (await confirmed(sql, pg)) < row[0]:
                await sql.execute("select pg_log_standby_snapshot()")
                await asyncio.sleep(0.1)
        assert changes.name == "search"  # it is here all the time


async def test_the_stream_recovers_when_its_backend_is_terminated(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        txn = await following(changes)
        await sql.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots "
            "where slot_name = %s",
            (pg.settings.slot_name,),
        )
        await sql.execute("insert into orders values (2, 'b')")
        assert ids(await following(changes)) == [2]
        await txn.ack()


async def test_a_dropped_slot_is_created_again_with_a_reset(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        slot = pg.settings.slot_name
    await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
    await sql.execute("insert into orders values (1, 'lost')")
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        item = await asyncio.wait_for(anext(changes), LIMIT)
        assert isinstance(item, Reset)
        assert "slot" in item.reason
        await published(pg)
        await sql.execute("insert into orders values (2, 'b')")
        assert ids(await following(changes)) == [2]


async def test_a_slot_moved_by_another_program_is_a_reset(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        await (await following(changes)).ack()
        slot = pg.settings.slot_name
    await sql.execute("insert into orders values (2, 'stolen')")
    await sql.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (slot,))
    async with make() as pg:
        item = await asyncio.wait_for(anext(pg.changes("search")), LIMIT)
        assert isinstance(item, Reset)
        assert "has moved the replication slot" in item.reason


async def test_a_reset_is_delivered_again_until_it_was_handled(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(pg)
        await changes.aclose()
        slot = pg.settings.slot_name
    await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
    for _ in range(2):
        async with make() as pg:
            item = await asyncio.wait_for(anext(pg.changes("search")), LIMIT)
            assert isinstance(item, Reset)
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        assert isinstance(await asyncio.wait_for(anext(changes), LIMIT), Reset)
        asking = asyncio.ensure_future(anext(changes))
        await published(pg)
        await sql.execute("insert into orders values (1, 'a')")
        await asyncio.wait_for(asking, LIMIT)
    async with make() as pg:
        assert ids(await following(pg.changes("search", tables=["orders"]))) == [1]


async def test_drop_removes_slot_and_publication(make: MakePostgres, sql: Sql) -> None:
    pg = make()
    await pg.open()
    await pg.wait_until_active(LIMIT)
    await pg.drop()
    slots = await (
        await sql.execute("select 1 from pg_replication_slots where database = current_database()")
    ).fetchall()
    publications = await (await sql.execute("select 1 from pg_publication")).fetchall()
    assert (slots, publications) == ([], [])


async def test_drop_waits_for_the_reader_of_the_slot(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        slot = pg.settings.slot_name
        options = pg.settings
    link = await ReplicationLink.dial(streamed_url)
    setup = Setup(options)
    await link.stream(setup.start_command(), timeout=LIMIT)
    dropping = asyncio.create_task(_admin.drop_slot(sql, slot))
    await asyncio.sleep(0.2)
    assert not dropping.done(), "it is being read"
    link.cut()
    await link.close()
    await asyncio.wait_for(dropping, LIMIT)
    assert (
        await (
            await sql.execute("select 1 from pg_replication_slots where slot_name = %s", (slot,))
        ).fetchall()
        == []
    )


async def test_a_wrong_password_is_fatal(make: MakePostgres, sql: Sql, streamed_url: str) -> None:
    wrong = psycopg.conninfo.make_conninfo(streamed_url, user="nobody_here", password="wrong")
    async with make(replication_url=wrong) as pg:
        changes = pg.changes("search")
        with pytest.raises(PostgresError, match=r"user name or the password|does not permit"):
            await pg.wait_until_active(LIMIT)
        with pytest.raises(PostgresError, match=r"user name or the password|does not permit"):
            await asyncio.wait_for(anext(changes), LIMIT)
        assert pg.health.value == "failed"
