"""Dropping, fatal errors, retained WAL of open transactions, and counts that survive a sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from moored.postgres import (
    ConfigurationError,
    Postgres,
    PostgresError,
    Reset,
    StateError,
    Transaction,
)
from moored.postgres.manage import _manager

from .conftest import MakePostgres, Sql
from .server import LIMIT, connected, following, ids, one, own_server, quicken, stands_by, until

MIB = 2**20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


SLOTS = "select count(*) from pg_replication_slots where database = current_database()"
PUBLICATIONS = "select count(*) from pg_publication"


# -- drop ------------------------------------------------------------------------------------------


async def test_drop_before_open_is_an_error(make: MakePostgres) -> None:
    with pytest.raises(PostgresError, match="is not open"):
        await make().drop()


async def test_drop_before_it_is_active(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
    assert await one(sql, SLOTS) == 1
    pg = make()
    await pg.open()
    await pg.drop()
    assert (await one(sql, SLOTS), await one(sql, PUBLICATIONS)) == (0, 0)


async def test_a_standby_cannot_drop_an_active_slot(make: MakePostgres, sql: Sql) -> None:
    async with make() as owner:
        changes = owner.changes(tables=["orders"])
        await owner.wait_until_published(timeout=LIMIT)
        standby = make()
        await standby.open()
        await stands_by(standby)
        with pytest.raises(PostgresError, match="could not be dropped"):
            await standby.drop()
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]


async def test_drop_of_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    pg = Postgres(
        "postgresql://nobody@127.0.0.1:1/none", state_dir=tmp_path, pool_size=2, connect_timeout=2.0
    )
    await pg.open()
    with pytest.raises(PostgresError, match="could not be dropped"):
        await pg.drop()


# -- close -----------------------------------------------------------------------------------------


async def test_close_releases_every_waiter(tmp_path: Path) -> None:
    pg = Postgres("postgresql://nobody@127.0.0.1:1/none", state_dir=tmp_path, pool_size=2)
    await pg.open()
    none: Any = None
    waiters = [
        pg.wait_until_active(),
        pg.wait_until_published("orders", timeout=none),
        pg.connection(timeout=none).__aenter__(),
    ]
    waiting = [asyncio.ensure_future(each) for each in waiters]
    await asyncio.sleep(0)
    await pg.close()
    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LIMIT)
    assert [type(each) for each in ends] == [PostgresError] * 3
    assert all("is not open" in str(each) for each in ends)


async def test_close_releases_a_waiter_for_a_table(make: MakePostgres) -> None:
    none: Any = None
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        waiting = asyncio.ensure_future(pg.wait_until_published("none", timeout=none))
        await asyncio.sleep(0)
    with pytest.raises(PostgresError, match="is not open"):
        await asyncio.wait_for(waiting, LIMIT)


async def test_a_cancelled_close_completes(make: MakePostgres) -> None:
    pg = make()
    await pg.open()
    await pg.wait_until_active(LIMIT)
    events = asyncio.ensure_future(anext(pg.events(), None))
    closing = asyncio.ensure_future(pg.close())
    while pg.is_open:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(closing), LIMIT)
    await pg.close()
    assert await asyncio.wait_for(events, LIMIT) is None
    with pytest.raises(StateError, match="closed database"):
        pg._stack.store.load()


# -- after a fatal error ---------------------------------------------------------------------------


async def test_changes_after_a_fatal_error_raises_it(tmp_path: Path) -> None:
    async with (
        own_server(wal_level="replica") as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        with pytest.raises(ConfigurationError, match="wal_level"):
            await pg.wait_until_active(LIMIT)
        with pytest.raises(ConfigurationError, match="wal_level"):
            pg.changes(tables=["orders"])


# -- the log that the server keeps -----------------------------------------------------------------


async def test_no_consumer_is_dropped_for_wal_of_an_open_transaction(
    make: MakePostgres, sql: Sql, streamed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manager, "WATCH_EVERY", 0.2)
    async with make(max_retained_wal=MIB, on_retained_wal="drop") as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        async with connected(streamed_url) as writer:
            await writer.execute("begin")
            await writer.execute("create table other (id int)")
            number = 0

            async def blamed() -> bool:
                nonlocal number
                number += 1
                await sql.execute("insert into orders values (%s, repeat('x', 200000))", (number,))
                txn = await following(changes)
                assert not isinstance(txn, Reset)
                await txn.ack()
                await sql.execute("select pg_switch_wal()")
                return any(event.name == "retained_wal_exceeded" for event in pg.last_events)

            await until(blamed)
            (said, *_) = (e.detail for e in pg.last_events if e.name == "retained_wal_exceeded")
            assert "a long-running transaction" in said
            await writer.execute("rollback")
        await sql.execute("insert into orders values (0, 'x')")
        assert ids(await following(changes)) == [0]


async def test_no_consumer_is_dropped_for_wal_that_it_has_just_received(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch of the WAL file moves the position of the next transaction by up to 16 MB."""
    monkeypatch.setattr(_manager, "WATCH_EVERY", 3.0)
    async with make(max_retained_wal=MIB, on_retained_wal="drop") as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        manager = pg._restarter.manager
        for number in range(2):
            looked = manager.retained_at

            async def seen() -> bool:
                return manager.retained_at > looked  # noqa: B023

            await until(seen)  # from now on, there is time until the next look
            await sql.execute("insert into orders values (%s, 'x')", (100 + number,))
            await sql.execute("select pg_switch_wal()")
            await sql.execute("insert into orders values (%s, 'x')", (number,))
            items = [await following(changes) for _ in range(2)]
            looked = manager.retained_at
            await until(seen)
            for item in items:
                assert isinstance(item, Transaction)
                await item.ack()
        await sql.execute("insert into orders values (7, 'x')")
        assert ids(await following(changes)) == [7]
        assert not [e for e in pg.last_events if "for the consumer" in e.detail]


async def test_the_number_of_restarts_survives_a_sleep(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        query = (
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name=%s"
        )

        async def ended() -> bool:
            return bool(await one(sql, query, pg.settings.slot_name))

        await until(ended)

        async def restarted() -> bool:
            return bool(pg.statistics()["restarts"])

        await until(restarted)
        await pg.wait_until_active(LIMIT)
        await pg.sleep()
        async with pg.connection(timeout=LIMIT) as conn:
            assert isinstance(conn, psycopg.AsyncConnection)
        assert pg.statistics()["restarts"] == 1
