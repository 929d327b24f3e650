"""A cursor of another or of a restored server is a `Reset`, never a silent gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.postgres.clusters import Cluster, cluster

from moored.postgres.outbox import Outbox, ddl

from .conftest import Sql
from .reading import next_event, next_reset, payloads


@pytest.fixture
async def db() -> AsyncIterator[Cluster]:
    async with cluster(archive_mode="on") as db:
        await db.sql(ddl())
        yield db


async def publish(db: Cluster, *texts: str) -> None:
    await db.sql(*(f"select moored.outbox_publish('orders', '{text}')" for text in texts))


async def test_a_restore_to_an_earlier_point_is_a_reset(db: Cluster) -> None:
    await publish(db, "1", "2")
    backup = await db.back_up()
    await db.restore_point("before")
    await publish(db, "3")
    async with Outbox(db.url, retain=None) as outbox, outbox.consume("live") as live:
        assert await payloads(live, 3) == ["1", "2", "3"]
        cursor = (await outbox.read()).cursor
        waiting = asyncio.ensure_future(next_reset(live))
        await db.restore(backup, "before")
        assert "on timeline 2 instead of 1" in await waiting
        assert await payloads(live, 2) == ["1", "2"], "what the new history has"
        batch = await outbox.read(cursor)
        assert batch.reset is not None
        assert "on timeline 2 instead of 1" in batch.reset.reason
        assert len((await outbox.read(batch.cursor)).events) == 2


async def test_a_restored_copy_of_the_disk_is_a_reset(db: Cluster) -> None:
    await publish(db, "1")
    await db.server.stop()
    copy = db.copy_data()
    await db.server.start()
    await publish(db, "2", "3", "4")
    async with Outbox(db.url, retain=None) as outbox, outbox.consume("live") as live:
        assert await payloads(live, 4) == ["1", "2", "3", "4"]
        events = (await outbox.read()).events
        waiting = asyncio.ensure_future(next_reset(live))
        await db.server.stop()
        db.replace_data(copy)
        await db.server.start()
        assert "a copy of the database's disk was restored" in await waiting
        # Its ids pass those of the lost events: only the events themselves differ.
        await publish(db, *"abcdefghij")
        for lost in events[1:]:
            batch = await outbox.read(lost.cursor)
            assert batch.reset is not None, lost
            assert "the cursor's event does not exist" in batch.reset.reason
        kept = await outbox.read(events[0].cursor)
        assert [event.payload for event in kept.events] == list("abcdefghij")


async def test_another_server_is_a_reset(url: str, sql: Sql) -> None:
    async with Outbox(url, retain=None) as outbox:
        await outbox.publish(sql, "orders", "1")
        cursor = (await outbox.read()).cursor
        system = cursor.partition("-")[0]
        batch = await outbox.read(cursor.replace(system, "1", 1))
        assert batch.reset is not None
        assert batch.reset.reason == f"this is another database (system {system} instead of 1)"
        async with outbox.consume("mine", start=cursor.replace(system, "1", 1)) as events:
            assert "another database" in await next_reset(events)
            assert (await next_event(events)).payload == "1"


async def test_an_unhandled_reset_is_repeated(url: str, sql: Sql) -> None:
    async with Outbox(url, retain=None) as outbox:
        await outbox.publish(sql, "orders", "1")
        stale = (await outbox.read()).cursor.replace("-1-", "-9-", 1)
        async with outbox.consume("mine", start=stale) as events:
            await next_reset(events)
        async with outbox.consume("mine") as events:
            assert "on timeline 1 instead of 9" in await next_reset(events)
            await next_event(events)
        async with outbox.consume("mine") as events:
            assert (await next_event(events)).payload == "1"
