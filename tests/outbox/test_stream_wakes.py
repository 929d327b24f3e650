"""`wake="stream"`: the change stream of a `Postgres` wakes the consumers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from tests.postgres.server import own_server, until

from moored.postgres import ConfigurationError, Outbox, Postgres
from moored.postgres.outbox import _wakes

from .reading import LIMIT, next_event


async def test_the_stream_wakes_consumers_without_a_notification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    async with (
        own_server() as server,
        Postgres(server.url, messages=True, state_dir=tmp_path, pool_size=4) as pg,
        await psycopg.AsyncConnection.connect(server.url, autocommit=True) as sql,
    ):
        await pg.wait_until_active(LIMIT)
        async with Outbox(pg, wake="stream", install=True) as outbox:
            await sql.execute("listen moored_outbox")

            async def up() -> bool:
                return outbox.wakes.up

            await until(up)
            async with outbox.consume("search") as events:
                for number in range(5):
                    waiting = asyncio.ensure_future(next_event(events))
                    await asyncio.sleep(0.05)
                    await outbox.publish(sql, "orders", str(number))
                    event = await waiting
                    assert event.payload == str(number)
                    await event.ack()
            assert outbox.wakes.notified >= 5
            assert [each async for each in sql.notifies(timeout=0)] == []
        assert not pg.statistics()["consumers"], "no WAL is kept for the wake-ups"


async def test_an_event_that_the_stream_announces_before_it_is_visible_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    # A commit of the publisher is in the WAL, and waits for a standby that does not exist.
    async with (
        own_server(synchronous_standby_names="nobody", synchronous_commit="local") as server,
        Postgres(server.url, messages=True, state_dir=tmp_path, pool_size=4) as pg,
        await psycopg.AsyncConnection.connect(server.url, autocommit=True) as sql,
        Outbox(pg, wake="stream", install=True) as outbox,
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


async def test_a_stream_without_messages_is_refused(tmp_path: Path) -> None:
    pg = Postgres("postgresql://db/app", state_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"use Postgres\(…, messages=True\)"):
        Outbox(pg, wake="stream")
    with pytest.raises(ValueError, match=r'must be a Postgres for wake="stream"'):
        Outbox("postgresql://db/app", wake="stream")
