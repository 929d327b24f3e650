"""`Postgres.outbox`: started by its first consumer, and shown with its `Postgres`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.postgres.conftest import MakePostgres, make, sql, stream_id, streamed_url
from tests.postgres.server import until

from moored.broker import SourceEvent
from moored.broker.postgres import OutboxEvents
from moored.postgres import ConfigurationError, PostgresError

from .conftest import Sql
from .reading import LIMIT, next_event, payloads, publishing

__all__ = ["make", "sql", "stream_id", "streamed_url"]


async def test_the_first_consumer_starts_the_outbox(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make(show_queries=True) as pg:
        await pg.outbox.install()
        assert pg.statistics()["outbox"] is None
        await pg.outbox.publish(sql, "orders", "1")
        async with pg.outbox.consume("search") as events:
            assert await payloads(events, 1) == ["1"]

            async def woken() -> bool:
                return pg.outbox.wakes.up

            await until(woken)
            assert pg.listener is not None
            assert pg.listener.up
            assert "outbox" in str(pg.tree())
            async with publishing(streamed_url) as culprit:
                await pg.outbox.publish(sql, "orders", "2")
                await pg.outbox.status()
                assert f"transaction of backend {culprit.info.backend_pid}" in pg.explain()
                held = pg.statistics()["outbox"]["status"]["held_back"]
                assert held["pid"] == culprit.info.backend_pid
                await culprit.rollback()
            last = await next_event(events)
            await last.ack()
            leaving = events
    # Closing has ended the consumer, and stored its cursor.
    assert [item async for item in leaving] == []
    async with make() as pg, pg.outbox.consume("search") as events:
        await pg.outbox.publish(sql, "orders", "3")
        assert await payloads(events, 1) == ["3"]
    with pytest.raises(PostgresError, match="is not open"):
        pg.outbox.consume("search")


async def test_a_first_use_that_is_cancelled_leaves_no_connection_behind(
    make: MakePostgres,
) -> None:
    before = asyncio.all_tasks()
    for turns in range(20):
        async with make() as pg:
            reading = asyncio.create_task(pg.outbox.status())
            for _ in range(turns):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
        left = [each.get_name() for each in asyncio.all_tasks() - before]
        assert [name for name in left if ".outbox" in name] == []


@pytest.mark.parametrize("turns", [1, 3, 20])
async def test_a_close_that_is_cancelled_leaves_nothing_open(
    make: MakePostgres, turns: int
) -> None:
    before = asyncio.all_tasks()
    async with make() as pg:
        await pg.outbox.install()
        async with pg.outbox.consume("search"):
            closing = asyncio.create_task(pg.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            assert not pg.is_open
    left = [each.get_name() for each in asyncio.all_tasks() - before]
    assert [name for name in left if "moored" in name or "postgres" in name] == []


async def test_an_opening_that_is_cancelled_leaves_nothing_open(make: MakePostgres) -> None:
    pg = make()
    opening = asyncio.create_task(pg.open())
    while not pg.is_open:  # noqa: ASYNC110 (the first moment)
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert not pg.is_open


async def test_readers_go_on_while_the_connections_are_put_to_sleep(
    make: MakePostgres, sql: Sql
) -> None:
    expected = [str(number) for number in range(25)]

    async def consumed() -> list[str]:
        async with pg.outbox.consume("search") as events:
            return await payloads(events, len(expected))

    async def tailed() -> list[str]:
        found: list[str] = []
        async for batch in pg.outbox.tail(start):
            found += [event.payload for event in batch.events]
            if len(found) >= len(expected):
                break
        return found

    async with make() as pg, asyncio.timeout(LIMIT):
        await pg.outbox.install()
        start = (await pg.outbox.read()).cursor
        readers = asyncio.gather(consumed(), *(tailed() for _ in range(8)))
        for number in expected:
            await pg.outbox.publish(sql, "orders", number)
            await pg.sleep()
        assert await readers == [expected] * 9


async def test_it_is_a_source_of_a_broker(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg, asyncio.timeout(LIMIT):
        await pg.outbox.install()
        async with aclosing(OutboxEvents(pg.outbox).events()) as events:
            await anext(events)
            await pg.outbox.publish(sql, "orders", "1", tenant="acme")
            found = [await anext(events)]
            while not isinstance(found[-1], SourceEvent):
                found.append(await anext(events))
            assert found[-1][:3] == ("orders", "1", "acme")


async def test_without_an_installation_the_error_says_what_to_run(make: MakePostgres) -> None:
    async with make() as pg:
        with pytest.raises(ConfigurationError, match="moored outbox install"):
            async with asyncio.timeout(LIMIT), pg.outbox.consume("search"):
                pass
