"""Partitions: made ahead, dropped by time and size, one process at a time."""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.postgres.server import until

from moored.kernel import Context
from moored.postgres.outbox import Outbox

from .conftest import Sql
from .reading import LIMIT, next_event, next_reset, payloads, transaction

_numbers = itertools.count(1)
_upkeep = Outbox._upkeep


@pytest.fixture(autouse=True)
def no_background_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests call `upkeep()` themselves."""

    async def idle(self: Outbox, ctx: Context) -> None:
        ctx.started()
        await asyncio.Event().wait()

    monkeypatch.setattr(Outbox, "_upkeep", idle)


async def value(sql: Sql, query: str) -> Any:
    row = await (await sql.execute(query.encode())).fetchone()
    assert row is not None
    return row[0]


async def partitions(sql: Sql) -> int:
    return int(await value(sql, "select count(*) from moored.outbox_parts where ends is not null"))


async def age(sql: Sql, days: int) -> None:
    """Make every partition, and what it holds, older."""
    rows = await (
        await sql.execute(
            "select name::text, ends from moored.outbox_parts where ends is not null order by ends"
        )
    ).fetchall()
    async with sql.transaction():
        for name, _ in rows:
            await sql.execute(f"alter table moored.outbox detach partition {name}".encode())
            await sql.execute(f"update {name} set at = at - interval '{days} days'".encode())
        for name, ends in rows:
            new = f"aged_{next(_numbers)}"
            await sql.execute(f"alter table {name} rename to {new}".encode())
            starts, end = (f"'{ends - timedelta(days + more)}'" for more in (1, 0))
            await sql.execute(
                f"alter table moored.outbox attach partition moored.{new} "
                f"for values from ({starts}) to ({end})".encode()
            )


async def test_partitions_are_made_ahead(sql: Sql, outbox: Outbox) -> None:
    assert await partitions(sql) == 4, "today and three days"
    assert (await outbox.upkeep()).created == 0
    await age(sql, 2)
    assert (await outbox.upkeep()).created == 2


async def test_old_partitions_are_dropped(sql: Sql, outbox: Outbox) -> None:
    await outbox.publish(sql, "orders", "1")
    await age(sql, 30)
    await outbox.upkeep()
    await outbox.publish(sql, "orders", "2")
    assert await partitions(sql) == 4
    assert [event.payload for event in (await outbox.read()).events] == ["2"]


async def test_a_cursor_older_than_the_retention_is_a_reset(sql: Sql, outbox: Outbox) -> None:
    await outbox.publish(sql, "orders", "1")
    await outbox.publish(sql, "orders", "2")
    async with outbox.consume("behind") as events, outbox.consume("live") as live:
        assert await payloads(events, 1) == ["1"]
        assert await payloads(live, 2) == ["1", "2"]
    cursors = [event.cursor for event in (await outbox.read()).events]
    await age(sql, 30)
    assert (await outbox.upkeep()).dropped == 4
    await outbox.publish(sql, "orders", "3")
    for name in ("behind", "live"):
        async with outbox.consume(name) as events:
            if name == "behind":
                assert "dropped by the retention" in await next_reset(events)
            assert (await next_event(events)).payload == "3"
    first, second = [await outbox.read(cursor) for cursor in cursors]
    assert first.reset is not None
    assert second.reset is None, "it has missed nothing"
    async with outbox.consume("new") as events:
        assert (await next_event(events)).payload == "3"


async def test_the_oldest_partitions_are_dropped_beyond_a_size(url: str, sql: Sql) -> None:
    outbox = Outbox(url, retain=365 * 86400.0, max_bytes=300_000)
    async with outbox:
        await outbox.publish(sql, "orders", "".join(map(chr, range(0x400, 0x9400))) * 5)
        await age(sql, 30)
        assert (await outbox.upkeep()).created == 4
        await outbox.publish(sql, "orders", "small")
        assert (await outbox.upkeep()).dropped == 0
        assert [len(event.payload) for event in (await outbox.read()).events] == [5]


async def test_the_current_partition_is_never_dropped(url: str, sql: Sql) -> None:
    async with Outbox(url, max_bytes=1) as outbox:
        await outbox.publish(sql, "orders", "1")
        assert (await outbox.upkeep()).dropped == 0
        assert len((await outbox.read()).events) == 1


async def test_an_insert_without_a_partition_goes_to_the_default_partition(
    sql: Sql, outbox: Outbox
) -> None:
    await age(sql, 30)
    await outbox.publish(sql, "orders", "1")
    assert await value(sql, "select count(*) from moored.outbox_default") == 1
    # The rest of the present day stays there; the next days get partitions again.
    assert (await outbox.upkeep()).created == 3
    await outbox.publish(sql, "orders", "2")
    assert len((await outbox.read()).events) == 2
    await sql.execute("update moored.outbox_default set at = at - interval '8 days'")
    await outbox.upkeep()
    assert await value(sql, "select count(*) from moored.outbox_default") == 0
    assert await value(sql, "select floor from moored.outbox_state") == 2


async def test_an_open_transaction_postpones_the_drop_and_not_the_publishers(
    url: str, sql: Sql, outbox: Outbox
) -> None:
    await age(sql, 30)
    await sql.execute("select moored.outbox_partitions('1 day', 1)")
    async with transaction(url) as open_:
        await outbox.publish(open_, "orders", "1")
        dropping = asyncio.ensure_future(outbox.upkeep())
        for _ in range(20):
            async with asyncio.timeout(LIMIT):
                await outbox.publish(sql, "orders", "2")
        done = await dropping
        assert done.dropped is None, "postponed"
        assert done.created == 2, "new partitions do not wait for publishers"
    assert (await outbox.upkeep()).dropped == 4


async def test_one_process_at_a_time_does_the_upkeep(url: str, sql: Sql, outbox: Outbox) -> None:
    await age(sql, 30)
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("select moored.outbox_partitions()")
        assert await outbox.upkeep() == (0, 0)
        await other.rollback()
    assert (await outbox.upkeep()).created == 4


async def test_the_upkeep_runs_in_the_background(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outbox, "_upkeep", _upkeep)
    await age(sql, 30)
    async with Outbox(url):
        await until(lambda: _made(sql))


async def _made(sql: Sql) -> bool:
    return await partitions(sql) == 4
