"""Wake-ups by the change stream: in the process that has it, and in the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from tests.postgres.conftest import MakePostgres, make, sql, stream_id, streamed_url
from tests.postgres.server import following, ids, own_server, published, until

from moored.postgres import Listener, Outbox, Postgres
from moored.postgres.outbox import _wakes

from .conftest import Sql
from .reading import LIMIT, next_event

__all__ = ["make", "sql", "stream_id", "streamed_url"]


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up lets a consumer read; the poll looks whether one is due, as ever."""
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    monkeypatch.setattr(_wakes, "POLL_DOWN", 3600.0)


async def woken(outbox: Outbox, sql: Sql, count: int = 5) -> None:
    """Publish events, one after the other, and get each of them."""
    async with outbox.consume("search", start="now") as events:
        for number in range(count):
            waiting = asyncio.ensure_future(next_event(events))
            await asyncio.sleep(0.05)
            await outbox.publish(sql, "orders", str(number))
            event = await waiting
            assert event.payload == str(number)
            await event.ack()


async def hears(outbox: Outbox, *sources: str) -> None:
    """Wait until it is woken by these sources."""
    wakes = outbox.wakes
    outbox._check_open()  # its first use starts it

    async def up() -> bool:
        return all(wakes.hears(each) for each in sources)

    await until(up)


async def test_the_stream_wakes_consumers_without_a_notification_of_the_publisher(
    make: MakePostgres, sql: Sql, never_polls: None
) -> None:
    async with make(notify_url="") as pg:
        await pg.wait_until_active(LIMIT)
        await pg.outbox.install()
        assert await pg.outbox.installed_wake() == "stream"
        await sql.execute("listen moored_outbox")
        await hears(pg.outbox, "stream")
        await woken(pg.outbox, sql)
        # The process with the stream tells the others, and names the transactions.
        told = [each.payload async for each in sql.notifies(timeout=LIMIT, stop_after=1)]
        assert told
        assert all(each.replace(",", "").isdigit() for each in told)
        assert not pg.statistics()["consumers"], "no WAL is kept for the wake-ups"


async def test_a_standby_is_woken_by_the_process_that_has_the_stream(
    make: MakePostgres, sql: Sql, tmp_path: Path, never_polls: None
) -> None:
    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        await first.outbox.install()
        async with make(state_dir=tmp_path / "second") as second:
            await hears(second.outbox, "listener")
            await woken(second.outbox, sql)
            assert not second.monitor.conditions()["pg_lock_acquired"].met


async def test_publishers_that_notify_wake_the_outbox_of_a_postgres_too(
    make: MakePostgres, sql: Sql, never_polls: None
) -> None:
    """As in an installation by an earlier version; installing again leaves it so."""
    async with make() as pg:
        await pg.outbox.install(wake="notify")
        await pg.outbox.install()
        await hears(pg.outbox, "listener")
        await woken(pg.outbox, sql)
        await pg.outbox.status()
        assert "takes a lock of the whole server" in pg.outbox.explain()
        assert "--wake stream" in pg.outbox.explain()


async def test_a_listener_alone_is_not_trusted_while_publishers_use_the_stream(
    make: MakePostgres, sql: Sql, streamed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no process with a stream: the consumers read every second as well."""
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    async with (
        Listener(streamed_url) as listener,
        Outbox(streamed_url, listener=listener, retain=None) as outbox,
    ):
        await outbox.install(wake="stream")
        await hears(outbox, "listener")
        await outbox.status()
        await woken(outbox, sql, 1)
        await outbox.install(wake="notify")
        await outbox.status()
        assert outbox._certain() == "listener"


async def test_consumers_of_changes_see_nothing_of_wake_ups(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        await pg.outbox.install()
        every, orders = pg.changes("every"), pg.changes("orders", tables=["orders"])
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)
        await pg.outbox.publish(sql, "orders", "1")
        await sql.execute("select pg_logical_emit_message(true, 'other', 'text')")
        async with sql.transaction():
            await pg.outbox.publish(sql, "orders", "2")
            await sql.execute("insert into orders values (1, 'x')")
        for changes in (every, orders):
            txn = await following(changes)
            assert (ids(txn), len(list(txn))) == ([1], 1)


async def test_a_message_that_is_of_no_outbox_wakes_nobody(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        await sql.execute('listen "No Schema_outbox"; listen moored_outbox')
        for prefix in ("No Schema_outbox", "moored_outbox"):
            await sql.execute("select pg_logical_emit_message(true, %s, '')", [prefix])
        told = [each.channel async for each in sql.notifies(timeout=LIMIT, stop_after=1)]
        assert told == ["moored_outbox"]


async def test_an_event_that_the_stream_announces_before_it_is_visible_is_not_forgotten(
    tmp_path: Path, never_polls: None
) -> None:
    # A commit of the publisher is in the WAL, and waits for a standby that does not exist.
    async with (
        own_server(synchronous_standby_names="nobody", synchronous_commit="local") as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=4, notify_url="") as pg,
        await psycopg.AsyncConnection.connect(server.url, autocommit=True) as sql,
        Outbox(pg, install=True) as outbox,
        outbox.consume("search") as events,
    ):
        waiting = asyncio.ensure_future(next_event(events))
        await pg.wait_until_active(LIMIT)

        async def announced() -> bool:
            return outbox.wakes.up and outbox.wakes.notified > before

        before = -1
        await until(announced)
        before = outbox.wakes.notified
        await sql.execute("set synchronous_commit = on")
        publishing = asyncio.ensure_future(outbox.publish(sql, "orders", "1"))
        await until(announced)
        await asyncio.sleep(0.1)  # the consumer has read in vain
        assert not waiting.done()
        async with pg.connection() as conn:
            await conn.execute("select pg_cancel_backend(%s)", [sql.info.backend_pid])
        await publishing
        assert (await waiting).payload == "1"


async def test_a_pool_has_no_stream() -> None:
    with pytest.raises(ValueError, match=r'must be a Postgres for wake="stream"'):
        Outbox("postgresql://db/app", wake="stream")
