"""What is installed and captured, while transactions publish and write."""

from __future__ import annotations

import asyncio

import pytest

from moored.postgres import PostgresError
from moored.postgres.outbox import Outbox, _reader

from .conftest import Sql
from .reading import LIMIT, publishing, transaction


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
