"""The total order: late commits are never skipped; planted defects are caught."""

from __future__ import annotations

import asyncio
import math

import pytest
from tests.postgres.server import until

from moored.postgres.outbox import Outbox, _looks
from moored.postgres.outbox._barrier import Barrier
from moored.testing import mutant

from .barrier_model import Look
from .conftest import Sql
from .reading import LIMIT, next_event, payloads, transaction
from .test_barrier import without_bounds, without_holders


async def commits_out_of_order(url: str, outbox: Outbox, sql: Sql) -> list[str]:
    """What a consumer gets while three transactions commit in another order than they began."""
    found: list[str] = []

    async def read(cursor: str) -> str:
        batch = await outbox.read(cursor)
        found.extend(event.payload for event in batch.events)
        return batch.cursor

    start = (await outbox.read()).cursor
    async with transaction(url) as first, transaction(url) as second, transaction(url) as third:
        await outbox.publish(second, "orders", "second")
        await outbox.publish(first, "orders", "first")
        await outbox.publish(third, "orders", "third")
        await third.commit()
        cursor = await read(start)
        await first.commit()
        cursor = await read(cursor)
        await second.commit()
        await read(cursor)
    return found


async def test_late_commits_are_not_skipped(url: str, outbox: Outbox, sql: Sql) -> None:
    assert await commits_out_of_order(url, outbox, sql) == ["second", "first", "third"]


@pytest.mark.parametrize("look", [without_holders, without_bounds])
async def test_a_wrong_reader_is_caught(url: str, outbox: Outbox, sql: Sql, look: Look) -> None:
    with mutant(Barrier, "look", look, name="a wrong reader"):
        found = await commits_out_of_order(url, outbox, sql)
    assert found != ["second", "first", "third"]


async def test_only_a_scan_of_the_locks_is_followed_by_a_pause(
    outbox: Outbox, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watched() -> bool:
        return outbox.last_status is not None

    await until(watched)  # it looks every 15 s
    monkeypatch.setattr(_looks, "PAUSE", math.inf)
    monkeypatch.setattr(_looks, "LONGEST_PAUSE", 2 * LIMIT)
    async with asyncio.timeout(LIMIT):
        cursor = (await outbox.read()).cursor
        await outbox.read(cursor)
        await outbox.publish(sql, "orders", "1")
        assert len((await outbox.read(cursor)).events) == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await outbox.read(cursor)


async def test_events_are_delivered_once_the_other_publisher_ends_without_a_wake_up(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    async with outbox.consume("search") as events, transaction(url) as other:
        await outbox.publish(other, "orders", "rolled back")
        await outbox.publish(sql, "orders", "committed")
        waiting = asyncio.ensure_future(next_event(events))
        done, _ = await asyncio.wait({waiting}, timeout=1.5)
        assert not done, "the other transaction may still commit a lower id"
        await other.rollback()
        assert (await waiting).payload == "committed"


async def test_transactions_that_have_not_published_delay_no_event(
    url: str, postgres_url: str, outbox: Outbox, sql: Sql
) -> None:
    await sql.execute("create table other (id int)")
    async with transaction(postgres_url) as elsewhere, transaction(url) as writer:
        await elsewhere.execute("create table other (id int)")
        await writer.execute("insert into other values (1)")
        await writer.execute("select * from moored.outbox for share")
        await writer.execute("lock table moored.outbox in share update exclusive mode")
        await outbox.publish(sql, "orders", "now")
        assert [event.payload for event in (await outbox.read()).events] == ["now"]
        assert (await outbox.status()).held_back is None


async def test_the_order_of_a_transaction_is_that_of_its_statements(
    outbox: Outbox, sql: Sql
) -> None:
    async with sql.transaction():
        for number in range(20):
            await outbox.publish(sql, "orders", str(number))
    async with outbox.consume("search") as events:
        assert await payloads(events, 20) == [str(number) for number in range(20)]


async def test_a_restart_of_the_reader_beside_an_open_publisher_repeats_nothing(
    url: str, sql: Sql
) -> None:
    """What is final is stored, so that the next process does not wait for what was read."""
    async with transaction(url) as other:
        async with Outbox(url, retain=None) as outbox:
            for number in range(3):
                await outbox.publish(sql, "orders", str(number))
            await outbox.read()
            await outbox.publish(other, "orders", "open")
        async with Outbox(url, retain=None) as outbox, outbox.consume("new", start="now") as events:
            assert [each.payload for each in (await outbox.read()).events] == ["0", "1", "2"]
            await outbox.publish(sql, "orders", "later")
            await other.commit()
            assert await payloads(events, 2) == ["open", "later"]
