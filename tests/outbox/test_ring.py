"""An outbox without a table: messages in the WAL, and the last ones in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from tests.held import holds
from tests.postgres.conftest import MakePostgres, make, stream_id, streamed_url

from moored.broker import SourceEvent, SourceGap
from moored.broker.postgres import OutboxEvents
from moored.postgres import (
    ConfigurationError,
    Outbox,
    OutboxBatch,
    Postgres,
    PostgresError,
    Transaction,
)
from moored.testing import scaled

from .conftest import Sql
from .reading import LIMIT
from .test_publish import DRIVERS, Left

__all__ = ["make", "stream_id", "streamed_url"]

Opened = tuple[Postgres, Outbox, Sql]
Open = Callable[..., AbstractAsyncContextManager[Opened]]


@pytest.fixture
def opened(make: MakePostgres, streamed_url: str) -> Open:
    """Opens a stream, an outbox on it, and a connection in autocommit mode."""

    @asynccontextmanager
    async def with_ring(ring: int = 100) -> AsyncIterator[Opened]:
        async with (
            make(messages=True) as pg,
            Outbox(pg, wake="stream", table=False, ring=ring) as outbox,
            await psycopg.AsyncConnection.connect(streamed_url, autocommit=True) as sql,
        ):
            await pg.wait_until_active(LIMIT)
            yield pg, outbox, sql

    return with_ring


class Tail:
    """What `tail()` yields, one batch at a time."""

    def __init__(self, outbox: Outbox, after: str | None = None) -> None:
        self._batches = aiter(outbox.tail(after))
        self.cursor = after

    async def next(self) -> OutboxBatch:
        async with asyncio.timeout(LIMIT):
            batch = await anext(self._batches)
        self.cursor = batch.cursor
        return batch

    async def payloads(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            batch = await self.next()
            assert batch.reset is None
            found += [event.payload for event in batch.events]
        return found


async def emit(sql: Sql, payload: str) -> None:
    await sql.execute(
        "select pg_logical_emit_message(true, 'moored_events', "
        "json_build_object('channel', 'orders', 'payload', %s::text)::text)",
        [payload],
    )


async def test_an_event_exists_if_the_callers_transaction_commits(
    opened: Open, streamed_url: str
) -> None:
    async with opened() as (pg, outbox, _):
        tail = Tail(outbox)
        assert (await tail.next()).events == []
        for begin in DRIVERS:
            async with begin(streamed_url) as conn:
                for payload in ({"name": "Zoë 100%"}, "as it is"):
                    done = outbox.publish(conn, "orders", payload, tenant="acme")
                    if hasattr(done, "__await__"):
                        await done
            with suppress(Left):
                async with begin(streamed_url) as conn:
                    done = outbox.publish(conn, "orders", "rolled back")
                    if hasattr(done, "__await__"):
                        await done
                    raise Left
            assert await tail.payloads(2) == ['{"name":"Zoë 100%"}', "as it is"], begin
        batch = await outbox.read(tenant="acme", limit=1)
        assert (batch.events[0].tenant, batch.events[0].channel) == ("acme", "orders")
        assert batch.events[0].json() == {"name": "Zoë 100%"}
        rest = await outbox.read(batch.cursor, limit=1)
        assert [event.payload for event in rest.events] == ["as it is"], "within a transaction"
        assert (await outbox.read(tenant="other")).events == []
        assert outbox.wakes.up
        assert pg.statistics()["consumers"]["wake-ups of moored_events"]["outstanding"] == 0


async def test_events_come_in_the_order_of_the_commits(opened: Open, streamed_url: str) -> None:
    async with opened() as (_, outbox, sql):
        tail = Tail(outbox)
        await tail.next()
        async with await psycopg.AsyncConnection.connect(streamed_url) as early:
            await emit(early, "began first, committed last")
            await emit(sql, "1")
            await emit(sql, "2")
            await early.commit()
        assert await tail.payloads(3) == ["1", "2", "began first, committed last"]
        places = [outbox.place(event.cursor) for event in (await outbox.read()).events]
        assert places == sorted(places)


async def test_nothing_is_missed_or_repeated_while_the_stream_is_killed(
    opened: Open, streamed_url: str
) -> None:
    count = scaled(2000, least=100)

    async def write(writer: int) -> None:
        async with await psycopg.AsyncConnection.connect(streamed_url, autocommit=True) as conn:
            for number in range(count):
                await emit(conn, f"{writer}/{number}")
                if writer == 0 and number % (count // 2) == count // 4:
                    await conn.execute(
                        "select pg_terminate_backend(active_pid) from pg_replication_slots "
                        "where database = current_database()"
                    )

    async with opened(ring=10 * count) as (pg, outbox, _):
        tail = Tail(outbox)
        await tail.next()
        found, *_ = await asyncio.gather(tail.payloads(4 * count), *map(write, range(4)))
        assert sorted(found or ()) == sorted(f"{a}/{b}" for a in range(4) for b in range(count))
        assert pg.statistics()["connects"] >= 2


async def test_a_cursor_before_the_ring_is_a_reset(opened: Open) -> None:
    async with opened(ring=5) as (pg, outbox, sql):
        tail = Tail(outbox)
        await tail.next()
        before = tail.cursor
        for number in range(8):
            await emit(sql, str(number))
            assert await tail.payloads(1) == [str(number)]
        batch = await outbox.read(before)
        assert batch.reset is not None
        assert "dropped" in batch.reset.reason
        kept = await outbox.read(batch.cursor)
        assert [event.payload for event in kept.events] == ["3", "4", "5", "6", "7"]
        first = await Tail(outbox, before).next()
        assert first.reset is not None
        # The stream itself is reset: the server was restored, or as here, too much was retained.
        await pg._hub.drop("wake-ups of moored_events", "it was too far behind")
        assert (await tail.next()).reset is not None
        await emit(sql, "after")
        assert await tail.payloads(1) == ["after"]


async def test_a_cursor_of_another_server_or_beyond_the_end_is_a_reset(opened: Open) -> None:
    async with opened() as (_, outbox, _):
        batch = await outbox.read()
        system, timeline, lsn, *rest = batch.cursor.split("-")
        other = "-".join(("1", timeline, lsn, *rest))
        beyond = "-".join((system, timeline, str(int(lsn) + (1 << 40)), *rest))
        for cursor, why in ((other, "another database"), (beyond, "not been reached here")):
            reset = (await outbox.read(cursor)).reset
            assert reset is not None
            assert why in reset.reason
        # A cursor of a process that has read further is not.
        ahead = "-".join((system, timeline, str(int(lsn) + 16), *rest))
        assert (await outbox.read(ahead)).reset is None


async def test_it_is_a_source_of_a_broker(opened: Open) -> None:
    async with opened() as (_, outbox, sql):
        source = OutboxEvents(outbox)
        found: list[SourceEvent] = []
        async with asyncio.timeout(LIMIT), aclosing(source.events()) as events:
            assert isinstance(await anext(events), SourceGap)
            for number in range(3):
                await outbox.publish(sql, "orders", str(number), tenant="acme")
            while len(found) < 3:
                if isinstance(event := await anext(events), SourceEvent):
                    found.append(event)
        after = source.position(found[0].id)
        history = await source.read(after, "acme", frozenset({"orders"}), 10)
        assert [event.payload for event in history] == ["1", "2"]


async def test_a_message_that_is_not_an_event_is_logged(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as (_, outbox, sql):
        tail = Tail(outbox)
        await tail.next()
        for content in ("[]", "no JSON", '{"payload": 1}'):
            await sql.execute(
                "select pg_logical_emit_message(true, 'moored_events', %s::text)", [content]
            )
        await sql.execute("select pg_logical_emit_message(true, 'other', 'x')")
        await sql.execute("select pg_logical_emit_message(false, 'moored_events', 'x')")
        await emit(sql, "fine")
        assert await tail.payloads(1) == ["fine"]
    assert caplog.text.count("is not an event") == 3


@pytest.mark.parametrize("publishes", [False, True])
async def test_a_mass_update_does_not_hold_the_loop(opened: Open, publishes: bool) -> None:
    rows = scaled(1_000_000, least=300_000)
    async with opened() as (pg, outbox, sql):
        await sql.execute(
            "create table big as select n, 0 as seen from generate_series(1, %s) n", [rows]
        )
        await sql.execute("alter table big add primary key (n)")
        tail = Tail(outbox)
        await tail.next()
        async with pg.changes("other", tables=["big"]) as changes:
            await pg.wait_until_published("big")

            async def update() -> None:
                async with sql.transaction():
                    await emit(sql, "first") if publishes else None
                    await sql.execute("update big set seen = 1")
                    await emit(sql, "last") if publishes else None
                await emit(sql, "next")
                expected = ["first", "last", "next"] if publishes else ["next"]
                assert await tail.payloads(len(expected)) == expected
                async with asyncio.timeout(LIMIT):
                    seen = 0
                    while seen < rows + 2 * publishes:
                        txn = await anext(changes)
                        assert isinstance(txn, Transaction)
                        seen += len(txn)
                        await txn.ack()

            assert not await holds(update)


async def test_what_needs_a_table_is_refused(tmp_path: Path) -> None:
    pg = Postgres("postgresql://db/app", state_dir=tmp_path, messages=True)
    with pytest.raises(PostgresError, match="stores no cursors"):
        Outbox(pg, wake="stream", table=False).consume("search")
    with pytest.raises(ValueError, match='table=False must be True, unless wake="stream"'):
        Outbox("postgresql://db/app", table=False)
    with pytest.raises(ConfigurationError, match="messages=True"):
        Outbox(Postgres("postgresql://db/app", state_dir=tmp_path), wake="stream", table=False)
