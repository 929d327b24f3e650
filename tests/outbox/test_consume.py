"""Consumers: cursors, acknowledgements, filters, wake-ups and lost connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from tests.postgres.server import until

from moored.postgres import ConfigurationError, PostgresError
from moored.postgres.listen import Listener
from moored.postgres.outbox import ConsumerReplaced, Outbox, _consumer, _wakes, ddl
from moored.reservoir import AsyncConnectionPool

from .conftest import Sql
from .reading import LIMIT, next_event, payloads


async def publish(
    outbox: Outbox, sql: Sql, *texts: str, channel: str = "orders", tenant: str | None = None
) -> None:
    for text in texts:
        await outbox.publish(sql, channel, text, tenant=tenant)


async def test_a_consumer_continues_after_what_it_has_acknowledged(
    outbox: Outbox, sql: Sql
) -> None:
    await publish(outbox, sql, "1", "2", "3", "4")
    async with outbox.consume("search") as events:
        assert await payloads(events, 2) == ["1", "2"]
        assert (await next_event(events)).payload == "3"
    async with outbox.consume("search") as events:
        assert await payloads(events, 2) == ["3", "4"]
    async with outbox.consume("audit") as events:
        assert await payloads(events, 1) == ["1"]


async def test_only_a_prefix_without_gaps_counts_as_acknowledged(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, "1", "2", "3")
    async with outbox.consume("search") as events:
        first, second, third = [await next_event(events) for _ in range(3)]
        await third.ack()
        await first.ack()
        await first.ack()
    async with outbox.consume("search") as events:
        assert (await next_event(events)).payload == second.payload


async def test_a_new_consumer_may_start_now_or_at_a_cursor(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, "1", "2", "3")
    cursor = (await outbox.read(limit=2)).cursor
    async with outbox.consume("search", start="now") as events:
        await publish(outbox, sql, "4")
        assert await payloads(events, 1) == ["4"]
    async with outbox.consume("search", start=cursor) as events:
        assert await payloads(events, 2) == ["3", "4"]
    with pytest.raises(ValueError, match="'later' is not a cursor"):
        outbox.consume("search", start="later")


async def test_filters_by_channel_and_tenant(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, "1", tenant="acme")
    await publish(outbox, sql, "2", channel="refunds", tenant="acme")
    await publish(outbox, sql, "3", channel="refunds", tenant="other")
    await publish(outbox, sql, "4", channel="visits")
    async with outbox.consume("a", channels=["refunds", "visits"]) as events:
        assert await payloads(events, 3) == ["2", "3", "4"]
    async with outbox.consume("b", tenant="acme") as events:
        assert await payloads(events, 2) == ["1", "2"]
    async with outbox.consume("c", tenant="acme", channels=["refunds"]) as events:
        assert await payloads(events, 1) == ["2"]
    with pytest.raises(ValueError, match="must be a list of str"):
        outbox.consume("d", channels="refunds")


async def test_an_idle_consumer_passes_the_events_that_it_does_not_read(
    outbox: Outbox, sql: Sql
) -> None:
    async with outbox.consume("search", channels=["refunds"]) as events:

        async def has_read() -> bool:
            last = await (await sql.execute("select max(id) from moored.outbox")).fetchone()
            return events._read is not None and (events._read.id,) == last

        waiting = asyncio.ensure_future(next_event(events))
        await publish(outbox, sql, "1", "2")
        await until(has_read)
        waiting.cancel()
        await asyncio.wait({waiting})
    (consumer,) = (await outbox.status()).consumers
    assert consumer.lag == 0.0


async def test_the_second_to_store_the_cursor_is_replaced(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, "1", "2")
    async with outbox.consume("search") as one, outbox.consume("search") as two:
        assert await payloads(one, 1) == ["1"]
        with pytest.raises(ConsumerReplaced, match='cursor of consumer "search" was moved'):
            await payloads(two, 1)


LOST = psycopg.OperationalError("the connection was lost")


@pytest.mark.parametrize(
    "answers", [[(True, asyncio.CancelledError())], [(True, LOST), (False, LOST)]]
)
async def test_a_store_without_an_answer_is_not_taken_for_another_consumer(
    outbox: Outbox,
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[bool, BaseException]],
) -> None:
    """An answer: whether the server stores the cursor, and the error that the consumer gets."""
    monkeypatch.setattr(_consumer, "STORE_EVERY", 0.0)
    store, left = outbox._reader.store, iter(answers)

    async def unanswered(*cursors: Any) -> None:
        stores, error = next(left, (True, None))
        if stores:
            await store(*cursors)
        if error is not None:
            raise error

    monkeypatch.setattr(outbox._reader, "store", unanswered)
    await publish(outbox, sql, "1", "2", "3")
    async with outbox.consume("search") as events:
        for _ in range(3):
            event = await next_event(events)
            with suppress(asyncio.CancelledError):
                await event.ack()
    (consumer,) = (await outbox.status()).consumers
    assert consumer.lag == 0.0


async def test_a_rolled_back_acknowledgement_cannot_be_skipped(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    await publish(outbox, sql, "1", "2")
    async with (
        outbox.consume("search") as events,
        await psycopg.AsyncConnection.connect(url) as mine,
    ):
        await (await next_event(events)).ack(mine)
        await mine.rollback()
        with pytest.raises(ConsumerReplaced):
            await (await next_event(events)).ack(mine)
        await mine.rollback()
    async with outbox.consume("search") as events:
        assert (await next_event(events)).payload == "1"


async def test_within_a_transaction_events_are_acknowledged_in_order(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    await publish(outbox, sql, "1", "2")
    async with (
        outbox.consume("search") as events,
        await psycopg.AsyncConnection.connect(url) as mine,
    ):
        await next_event(events)
        with pytest.raises(PostgresError, match="an earlier one was not"):
            await (await next_event(events)).ack(mine)


async def test_several_events_may_be_acknowledged_in_one_transaction(
    url: str, outbox: Outbox, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the consumer is idle meanwhile, and tries to store that it has passed an event."""
    monkeypatch.setattr(_consumer, "STORE_IDLE", 0.0)
    await publish(outbox, sql, "1", "2")
    await publish(outbox, sql, "x", channel="visits")
    async with (
        outbox.consume("search", channels=["orders"]) as events,
        await psycopg.AsyncConnection.connect(url) as mine,
    ):
        await (await next_event(events)).ack(mine)
        await (await next_event(events)).ack(mine)
        waiting = asyncio.ensure_future(next_event(events))
        await asyncio.sleep(1.2)  # polled once at least
        await mine.commit()
        await publish(outbox, sql, "3")
        assert (await waiting).payload == "3"
    async with outbox.consume("search", channels=["orders"]) as events:
        assert (await next_event(events)).payload == "3"


async def test_an_event_of_read_cannot_be_acknowledged(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, "1")
    (event,) = (await outbox.read()).events
    with pytest.raises(PostgresError, match=r"only an event of Outbox.consume\(\)"):
        await event.ack()


async def test_several_tasks_may_share_a_consumer(outbox: Outbox, sql: Sql) -> None:
    await publish(outbox, sql, *map(str, range(40)))
    async with outbox.consume("search") as events:

        async def work() -> list[str]:
            return await payloads(events, 10)

        found = await asyncio.gather(*(work() for _ in range(4)))
    assert sorted((each for part in found for each in part), key=int) == [str(n) for n in range(40)]
    (consumer,) = (await outbox.status()).consumers
    assert consumer.lag == 0.0


async def test_closing_ends_a_waiting_iteration(url: str) -> None:
    async with Outbox(url) as outbox:
        events = outbox.consume("search")
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, LIMIT)


async def test_closing_ends_a_waiting_tail(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Outbox(url) as outbox:
        more, waits = outbox.wakes.more, asyncio.Event()

        async def wait_for_more(*args: Any) -> None:
            waits.set()
            await more(*args)

        monkeypatch.setattr(outbox.wakes, "more", wait_for_more)
        batches = outbox.tail()
        await anext(batches)
        waiting = asyncio.ensure_future(anext(batches))
        await waits.wait()
    with pytest.raises(PostgresError, match="is not open"):
        await asyncio.wait_for(waiting, LIMIT)


async def test_without_an_installation_the_error_says_what_to_run(url: str) -> None:
    async with Outbox(url, retain=None, schema="elsewhere") as outbox:
        with pytest.raises(ConfigurationError, match="run `moored outbox install`"):
            async with outbox.consume("search"):
                pass


async def test_another_version_of_the_tables_is_refused(sql: Sql, outbox: Outbox) -> None:
    await sql.execute("update moored.outbox_state set version = 99")
    with pytest.raises(ConfigurationError, match=r"version 99, .*: update this program"):
        await outbox.read()


async def test_a_pool_in_repeatable_read_may_be_used(url: str, sql: Sql) -> None:
    async def serializable(conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)

    async with AsyncConnectionPool(url, max_size=1, configure=serializable) as pool:
        outbox = Outbox(pool)
        await publish(outbox, sql, "1")
        assert len((await outbox.read()).events) == 1


# -- wake-ups ----------------------------------------------------------------------------------


@asynccontextmanager
async def with_listener(url: str) -> AsyncIterator[tuple[Listener, Outbox]]:
    async with Listener(url) as listener:
        await listener.wait_until_up(LIMIT)
        async with Outbox(url, listener=listener) as outbox:
            yield listener, outbox


async def test_a_notification_wakes_the_consumers(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    async with with_listener(url) as (_, outbox), outbox.consume("search") as events:
        for number in range(5):
            waiting = asyncio.ensure_future(next_event(events))
            await asyncio.sleep(0.05)
            await publish(outbox, sql, str(number))
            assert (await waiting).payload == str(number)
        assert outbox.wakes.up
        assert outbox.wakes.notified >= 5


async def test_without_a_listener_consumers_read_every_second(outbox: Outbox, sql: Sql) -> None:
    async with outbox.consume("search") as events:
        waiting = asyncio.ensure_future(next_event(events))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await publish(outbox, sql, "1")
        assert (await waiting).payload == "1"
        assert time.monotonic() - begun < 5.0
    assert not outbox.wakes.up


async def test_a_consumer_without_notifications_polls_even_if_the_listener_is_up(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute(ddl(wake="poll").encode())
    monkeypatch.setattr(_wakes, "POLL", 1.5)
    async with with_listener(url) as (_, outbox), outbox.consume("search") as events:
        waiting = asyncio.ensure_future(next_event(events))
        await publish(outbox, sql, "1")
        assert (await waiting).payload == "1"


async def test_consumers_read_every_second_while_the_listener_is_down(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wakes, "POLL", 3600.0)
    async with with_listener(url) as (listener, outbox), outbox.consume("search") as events:
        waiting = asyncio.ensure_future(next_event(events))
        await asyncio.sleep(0.05)
        await listener.close()
        await publish(outbox, sql, "1")
        assert (await waiting).payload == "1"


async def test_a_lost_connection_loses_nothing(
    url: str, outbox: Outbox, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_consumer, "RETRY", (0.05, 0.2))
    expected = [str(number) for number in range(60)]
    found: list[str] = []
    async with outbox.consume("search") as events:

        async def consume() -> None:
            while len(found) < len(expected):
                found.extend(await payloads(events, 1))

        consuming = asyncio.ensure_future(consume())
        for number in expected:
            await publish(outbox, sql, number)
            if int(number) % 10 == 5:
                await sql.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = current_database() and pid <> pg_backend_pid()"
                )
        await asyncio.wait_for(consuming, LIMIT)
    assert found == expected


async def test_a_cancellation_is_not_replaced_by_the_error_of_its_statement(
    outbox: Outbox, sql: Sql
) -> None:
    stubborn = """do $$ begin perform pg_sleep(60); exception when query_canceled then
        raise exception 'another error'; end $$ -- stubborn"""
    running = "select 1 from pg_stat_activity where query like 'do %-- stubborn'"
    work = asyncio.create_task(outbox._reader.run(stubborn))

    async def begun() -> bool:
        return await (await sql.execute(running)).fetchone() is not None

    await until(begun)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
