"""An outbox of version 2, whose order was (xid, id), is brought up to date while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from moored.cli import main
from moored.postgres import ConfigurationError
from moored.postgres.outbox import Outbox

from .conftest import Sql
from .reading import LIMIT, next_reset, payloads, transaction

VERSION_2 = Path(__file__).with_name("version_2.sql").read_text()
EVENT = "insert into moored.outbox (channel, payload) values ('orders', %s)"
#: The indexes that are valid, with the number of partitions that they have.
INDEXES = """
select c.relname, count(i.inhrelid) from pg_class c join pg_index x on x.indexrelid = c.oid
left join pg_inherits i on i.inhparent = c.oid
where x.indrelid = 'moored.outbox'::regclass and x.indisvalid group by 1 order by 1
"""


@pytest.fixture
async def old(database: str) -> AsyncIterator[Sql]:
    """A connection to a database with an outbox of version 2, which has events."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as conn:
        await conn.execute("drop schema if exists moored cascade; drop role if exists older")
        await conn.execute("create role older login password 'older'")
        await conn.execute(VERSION_2.encode())
        yield conn
        await conn.execute("drop owned by older; drop role older")


async def out_of_order(url: str) -> list[tuple[int, int, int]]:
    """Events whose xids are in another order than their ids; their xids, ids and marks, by xid."""
    async with transaction(url) as first, transaction(url) as second:
        await second.execute(EVENT, ["second"])
        await first.execute(EVENT, ["first"])
        await second.execute(EVENT, ["third"])
    async with await psycopg.AsyncConnection.connect(url) as conn:
        found = await conn.execute(
            "select xid::text::int8, id, (extract(epoch from at) * 1000000)::int8 "
            "from moored.outbox order by xid, id"
        )
        return [*await found.fetchall()]


async def store(sql: Sql, name: str, xid: int, id_: int, mark: int = 0) -> None:
    await sql.execute(
        "insert into moored.outbox_cursors select %s, concat_ws('-', system_identifier, 1, "
        "%s::int8, %s::int8, %s::int8) from pg_control_system()",
        [name, xid, id_, mark],
    )


async def all_of(sql: Sql, query: str) -> list[Any]:
    return await (await sql.execute(query.encode())).fetchall()


async def test_stored_cursors_are_converted_without_a_gap(database: str, old: Sql) -> None:
    rows = await out_of_order(database)
    for number, row in enumerate(rows):
        await store(old, f"after {number + 1}", *row)
    await store(old, "before all", rows[0][0], 0)
    with pytest.raises(ConfigurationError, match=r"version 2, .* needs 3: run `moored outbox upg"):
        async with Outbox(database, retain=None) as outbox:
            await outbox.read()
    async with Outbox(database, retain=None) as outbox:
        await outbox.upgrade()
        await outbox.upgrade()  # nothing is left to do
        # By xid: first, second, third; by id: second, first, third. Some come again, none is
        # missed.
        for name, unread in {
            "before all": ["second", "first", "third"],
            "after 1": ["second", "first", "third"],
            "after 2": ["third"],
            "after 3": [],
        }.items():
            await outbox.publish(old, "orders", name)
            async with outbox.consume(name) as events:
                assert (await payloads(events, len(unread) + 1))[: len(unread)] == unread
            await old.execute("delete from moored.outbox where payload = %s", [name])
        assert (await outbox.read()).cursor.count("-") == 3


async def test_a_cursor_that_is_kept_elsewhere_is_a_reset(database: str, old: Sql) -> None:
    rows = await out_of_order(database)
    await store(old, "kept", *rows[1])
    ((kept,),) = await all_of(old, "select cursor from moored.outbox_cursors")
    async with Outbox(database, retain=None) as outbox:
        await outbox.install()
        reset = (await outbox.read(kept)).reset
        assert reset is not None
        assert "the cursor is of an older version of the outbox" in reset.reason
        async with outbox.consume("elsewhere", start=kept) as events:
            assert "older version" in await next_reset(events)
            assert await payloads(events, 3) == ["second", "first", "third"]


async def test_a_cursor_before_the_retention_stays_a_reset(database: str, old: Sql) -> None:
    rows = await out_of_order(database)
    await store(old, "behind", rows[0][0] - 1, 7)
    await store(old, "live", *rows[2])
    await old.execute(
        "delete from moored.outbox; update moored.outbox_state set floor_xid = "
        f"'{rows[2][0]}', floor_id = {rows[2][1]}"
    )
    async with Outbox(database, retain=None) as outbox:
        await outbox.upgrade()
        await outbox.publish(old, "orders", "next")
        async with outbox.consume("behind") as events:
            assert "older version" in await next_reset(events)
        async with outbox.consume("live") as events:
            assert await payloads(events, 1) == ["next"]


async def test_an_open_publisher_is_waited_for_and_not_missed(database: str, old: Sql) -> None:
    """Without the lock, a lower id that is not committed yet would be behind the new cursor."""
    async with Outbox(database, retain=None) as outbox:
        await old.execute(EVENT, ["read"])
        ((xid,),) = await all_of(old, "select xid::text::int8 from moored.outbox")
        await store(old, "search", xid, 1)
        async with transaction(database) as late:
            await late.execute(EVENT, ["late"])
            await old.execute(EVENT, ["early"])
            upgrading = asyncio.ensure_future(outbox.install())
            for number in range(3):
                async with asyncio.timeout(LIMIT):
                    await old.execute(EVENT, [str(number)])
            assert not upgrading.done()
        await asyncio.wait_for(upgrading, LIMIT)
        async with outbox.consume("search") as events:
            assert await payloads(events, 5) == ["late", "early", "0", "1", "2"]


async def test_indexes_are_built_while_publishers_go_on(database: str, old: Sql) -> None:
    told: list[str] = []
    async with Outbox(database, retain=None) as outbox:
        # What an interrupted run has left.
        await old.execute("create index outbox_default_by_id on moored.outbox_default (id)")
        await old.execute(
            "update pg_index set indisvalid = false "
            "where indexrelid = 'moored.outbox_default_by_id'::regclass"
        )

        def report(text: str) -> None:
            told.append(text)

        async def publish() -> None:
            async with await psycopg.AsyncConnection.connect(database) as conn:
                while not upgrading.done():
                    await conn.execute(EVENT, ["x"])
                    await conn.commit()
                    await asyncio.sleep(0.001)

        upgrading = asyncio.ensure_future(outbox.upgrade(report=report))
        await asyncio.gather(upgrading, publish())
        assert await all_of(old, INDEXES) == [("outbox_by_id", 5), ("outbox_by_tenant", 5)]
        assert any("dropping what an interrupted run has left" in text for text in told)
        assert sum("building outbox_by_tenant of" in text for text in told) == 5
        count = len(await all_of(old, "select from moored.outbox"))
        async with outbox.consume("search") as events:
            assert len(await payloads(events, count)) == count
        # New partitions have them, too.
        await old.execute("select moored.outbox_partitions('1 day', 5)")
        assert await all_of(old, INDEXES) == [("outbox_by_id", 7), ("outbox_by_tenant", 7)]


async def test_roles_lose_the_right_to_choose_an_id(database: str, old: Sql) -> None:
    async with Outbox(database, retain=None) as outbox:
        await outbox.install()
    mine = psycopg.conninfo.make_conninfo(database, user="older", password="older")
    async with Outbox(mine, retain=None) as outbox, transaction(mine) as conn:
        await outbox.publish(conn, "orders", "1")
        await conn.commit()
        assert [event.payload for event in (await outbox.read()).events] == ["1"]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await conn.execute(
                "insert into moored.outbox (id, channel, payload) overriding system value "
                "values (9, 'orders', 'x')"
            )


async def test_an_older_program_publishes_and_does_not_read(database: str, old: Sql) -> None:
    async with Outbox(database, retain=None) as outbox:
        await outbox.upgrade()
        await old.execute("select moored.outbox_publish('orders', 'by an older program')")
        with pytest.raises(psycopg.errors.UndefinedColumn):
            await old.execute("select floor_xid from moored.outbox_state")
        with pytest.raises(psycopg.errors.UndefinedColumn):
            await old.execute(VERSION_2.encode())  # its `install=True`
        assert len((await outbox.read()).events) == 1


async def test_the_way_to_wake_consumers_is_kept(
    database: str, old: Sql, capsys: pytest.CaptureFixture[str]
) -> None:
    await old.execute("drop trigger outbox_wake on moored.outbox")
    arguments = ["outbox", "upgrade", "--database-url", database]
    assert await asyncio.to_thread(main, arguments) == 0
    out = capsys.readouterr().out
    assert "building outbox_by_id of outbox_default (0 bytes)" in out
    assert out.splitlines()[-1] == "the outbox in schema moored is up to date"
    found = await all_of(old, "select from pg_trigger where tgname = 'outbox_wake'")
    assert not found, "it is polled"


async def test_nothing_to_upgrade_is_an_error(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["outbox", "upgrade", "--database-url", database, "--schema", "nowhere"]
    assert await asyncio.to_thread(main, arguments) == 2
    assert "not installed in this database: run `moored outbox install`" in capsys.readouterr().err
