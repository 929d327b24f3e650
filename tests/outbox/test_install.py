"""What is installed and captured, while transactions publish and write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from moored.kernel import Clock
from moored.leases.postgres import open_store
from moored.postgres import Parking, PostgresError
from moored.postgres.outbox import Outbox, _reader, ddl
from moored.postgres.parking import parking_ddl
from moored.reservoir import AsyncConnectionPool

from .conftest import Sql
from .reading import LIMIT, publishing, transaction


async def install(url: str) -> None:
    async with Outbox(url, install=True):
        pass


async def park(url: str) -> None:
    async with Outbox(url) as outbox:
        await Parking.of(outbox, "mailer").prepare()


async def lease(url: str) -> None:
    store = open_store(url, clock=Clock.current())
    await store.open()
    await store.close()


async def install_after_a_migration(url: str) -> None:
    """The session has changed the catalog, and has looked for the schema."""
    async with AsyncConnectionPool(url, max_size=1) as pool:
        async with pool.connection() as conn:
            await conn.execute("create table if not exists migrated (id int)")
            await conn.execute("select to_regclass('moored.outbox')")
        await Outbox(pool).install()


@pytest.mark.parametrize("create", [install, park, lease, install_after_a_migration])
async def test_processes_that_start_at_once_may_create_the_schema_for_different_things(
    url: str, sql: Sql, create: Callable[[str], Awaitable[None]]
) -> None:
    await sql.execute("drop schema moored cascade")
    async with await psycopg.AsyncConnection.connect(url) as first:
        await first.execute((parking_ddl() if create is not park else ddl()).encode())
        second = asyncio.ensure_future(create(url))
        async with asyncio.timeout(LIMIT):
            waits = "select from pg_stat_activity where wait_event = 'advisory'"
            while not await (await sql.execute(waits)).fetchall():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    await asyncio.wait_for(second, LIMIT)


async def test_nothing_to_install_or_to_capture_waits_for_no_publisher(
    url: str, sql: Sql, outbox: Outbox
) -> None:
    await sql.execute("create table orders (id int, org text)")
    async with Outbox(url, schema="other", install=True, wake="poll", retain=None) as polled:
        await outbox.capture("orders", tenant_column="org")
        async with publishing(url) as conn, asyncio.timeout(LIMIT):
            await conn.execute("insert into orders values (1, 'acme')")
            await conn.execute("select other.outbox_publish('orders', 'open')")
            await outbox.upgrade()
            await outbox.install(wake="stream")
            await outbox.capture("orders", tenant_column="org")
            await polled.install()
            await polled.uncapture("other.outbox_cursors")
        assert await outbox.installed_wake() == "stream"
        assert await polled.installed_wake() == "poll"
    await sql.execute("drop schema other cascade")


async def test_a_capture_that_changes_waits_for_a_writer_and_not_for_long_at_a_time(
    url: str, sql: Sql, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_reader, "LOCK_AGAIN", 0.05)
    await sql.execute("create table orders (id int, org text)")
    await outbox.capture("orders")
    async with transaction(url) as conn:
        await conn.execute("insert into orders values (1, 'acme')")
        capturing = asyncio.ensure_future(outbox.capture("orders", tenant_column="org"))
        for number in range(3):
            async with asyncio.timeout(LIMIT):
                await sql.execute("insert into orders values (%s, 'acme')", [number])
        assert not capturing.done()
        monkeypatch.setattr(_reader, "LOCK_TRIES", 2)
        with pytest.raises(PostgresError, match="the table orders cannot be changed: at each of 2"):
            await outbox.uncapture("orders")
    await asyncio.wait_for(capturing, LIMIT)
    await sql.execute("insert into orders values (9, 'acme')")
    assert [event.tenant for event in (await outbox.read()).events] == [None] * 4 + ["acme"]
