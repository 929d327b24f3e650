"""From an outbox in a real PostgreSQL over HTTP: nothing lost, nothing twice, order kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.broker.fleet import Sent, roam
from tests.broker.serving import ACME, OTHER
from tests.held import holds
from tests.servers import empty_database, free_port

from moored.broker import Broker, LiveEvent, LiveStream, SourceEvent, SourceGap, StreamReset
from moored.broker.postgres import ChangeEvents, OutboxEvents
from moored.embedded import EmbeddedPostgres, SyncEmbeddedPostgres
from moored.postgres import Postgres
from moored.postgres.outbox import Outbox, _wakes, ddl
from moored.reservoir import AsyncConnectionPool
from moored.testing import scaled


@pytest.fixture
def url(postgres: SyncEmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a database with an outbox, which is polled often."""
    monkeypatch.setattr(_wakes, "POLL_DOWN", 0.05)
    with empty_database(postgres) as url:
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(ddl().encode())
        yield url


@asynccontextmanager
async def node(url: str) -> AsyncIterator[Broker]:
    """A broker on the outbox."""
    async with Outbox(url) as outbox:
        events = OutboxEvents(outbox)
        async with Broker(events, replay=events, channels=["orders"]) as broker:
            yield broker


class Writers:
    """Publish events in transactions that are open for a while, and so commit out of order."""

    def __init__(self, url: str, outbox: Outbox) -> None:
        self._url = url
        self._outbox = outbox

    async def __call__(self, writer: int, count: int) -> None:
        sent = 0
        while sent < count:
            with contextlib.suppress(psycopg.OperationalError):
                async with await psycopg.AsyncConnection.connect(self._url) as conn:
                    sent = await self._committed(conn, writer)
                    while sent < count:
                        async with conn.transaction():
                            await self._publish(conn, Sent(writer, sent))
                            await asyncio.sleep(random.uniform(0, 0.03))
                        sent += 1
            await asyncio.sleep(0.02)

    async def _publish(self, conn: psycopg.AsyncConnection, event: Sent) -> None:
        await self._outbox.publish(conn, "orders", event.body, tenant=event.tenant)

    async def _committed(self, conn: psycopg.AsyncConnection, writer: int) -> int:
        """Return how many events were committed: the answer may have been lost."""
        query = "select count(*) from moored.outbox where payload::json ->> 'writer' = %s"
        row = await (await conn.execute(query, (str(writer),))).fetchone()
        await conn.commit()
        assert row is not None
        return int(row[0])


async def test_clients_that_change_nodes_over_restarts_get_every_event_once(url: str) -> None:
    async with Outbox(url) as outbox:
        await roam(partial(node, url), Writers(url, outbox), scaled(500, least=10))


async def test_clients_get_every_event_once_over_restarts_of_the_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_wakes, "POLL_DOWN", 0.05)
    port = free_port()
    async with AsyncExitStack() as stack:

        async def start() -> str:
            server = EmbeddedPostgres(tmp_path / "data", port=port)
            return (await stack.enter_async_context(server)).url

        async def restart() -> None:
            await stack.aclose()
            await start()

        url = await start()
        async with Outbox(url, install=True) as outbox:
            await roam(partial(node, url), Writers(url, outbox), scaled(200, least=10), restart)


async def publish(url: str, outbox: Outbox, body: object, tenant: str | None) -> None:
    async with await psycopg.AsyncConnection.connect(url) as conn:
        await outbox.publish(conn, "orders", body, tenant=tenant)


async def first_id(url: str, outbox: Outbox) -> str:
    """Publish an event, and return its id."""
    async with node(url) as broker, broker.subscribe(ACME) as stream:
        await publish(url, outbox, {"org_id": ACME}, ACME)
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        return found.id


async def test_slow_read_of_the_history_is_cancelled_on_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.broker._replays.LIMIT", 0.2)
    slow = "select query_start from pg_stat_activity where state = 'active' and query = %s"

    class Slow(OutboxEvents):
        async def read(self, *_: object) -> list[SourceEvent]:
            async with pool.connection() as conn:
                await conn.execute(sleep)
            raise AssertionError

    sleep = "select pg_sleep(60)"
    async with (
        asyncio.timeout(60),
        AsyncConnectionPool(url, min_size=1) as pool,
        Outbox(pool) as outbox,
        Broker(Slow(outbox)) as broker,
        broker.subscribe(ACME) as first,
        broker.subscribe(ACME, after=first.start) as stream,
    ):
        taking = asyncio.create_task(stream.take())
        begun = set[object]()
        with psycopg.connect(url, autocommit=True) as watcher:
            while len(begun) < 3:
                running = watcher.execute(slow, [sleep]).fetchall()
                assert len(running) <= 1, "the one before was cancelled"
                begun.update(running)
                await asyncio.sleep(0.02)
            stream.subscriber.end("closed")
            assert await taking == []
            while watcher.execute(slow, [sleep]).fetchall():  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.02)


async def test_client_that_came_before_the_first_event_resumes_at_the_beginning(url: str) -> None:
    async with Outbox(url) as outbox, node(url) as broker, asyncio.timeout(60):
        async with broker.subscribe(ACME) as stream:
            start = stream.start
        await publish(url, outbox, {"org_id": ACME}, ACME)
        async with broker.subscribe(ACME, after=start) as stream:
            assert isinstance(await anext(stream), LiveEvent)


async def test_tenant_column_decides(url: str) -> None:
    async with node(url) as broker, Outbox(url) as outbox, broker.subscribe(OTHER) as stream:
        for tenant in (ACME, OTHER.replace("-", ""), None, OTHER):
            await publish(url, outbox, {"org_id": OTHER, "number": tenant}, tenant)
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        assert json.loads(found.payload)["number"] == OTHER
        dropped = {"other_tenant": 1, "tenant_not_canonical": 1, "no_tenant": 1}
        assert broker.statistics().dropped == dropped
        async with broker.subscribe(OTHER, after=stream.start) as again:
            replayed = await anext(again)
            assert isinstance(replayed, LiveEvent)
            assert replayed.id == found.id, "the history has the same events"


async def test_foreign_or_odd_cursor_is_a_reset(url: str) -> None:
    async with node(url) as broker, Outbox(url) as outbox:
        history, id, mark = (await first_id(url, outbox)).split("-")
        assert history[1:].isalnum()
        huge = "9" * 30
        for after in (
            "-".join(["0" * 16, id, mark]),
            "-".join([history, huge, mark]),
            "-".join([history, id, huge]),
            "-".join([history, id, mark, huge]),
            # The cursor of a server, as ids were before.
            "-".join(["7709356317011491811", "1", id, mark]),
            history,
            "nonsense",
        ):
            async with broker.subscribe(ACME, after=after) as stream, asyncio.timeout(30):
                reset = await anext(stream)
                assert isinstance(reset, StreamReset), after
                assert not any(letter.isdigit() for letter in reset.reason)


async def test_ids_and_resets_do_not_show_the_numbers_of_the_server(url: str) -> None:
    with psycopg.connect(url) as conn:
        row = conn.execute("select system_identifier::text from pg_control_system()").fetchone()
        assert row is not None
    async with node(url) as broker, Outbox(url) as outbox, broker.subscribe(ACME) as stream:
        await publish(url, outbox, {"org_id": ACME, "number": 1}, ACME)
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        cursor = (await outbox.read()).cursor
        assert cursor.startswith(f"{row[0]}-1-")
        assert row[0] not in found.sse.decode() + stream.start
        reason = f"this is another database (system {row[0]} instead of 1)"
        broker._gap(SourceGap(reason), kind="failure")
        reset = await anext(stream)
        assert isinstance(reset, StreamReset)
        assert reset.reason == "this is another database"
        broker._gap(SourceGap("the database is on timeline 2 instead of 1: …"), kind="failure")
        reset = await anext(stream)
        assert isinstance(reset, StreamReset)
        assert reset.reason == "the history of the source has changed"
    # Another node, and the same one after a restart, resumes at the id.
    async with node(url) as other, other.subscribe(ACME, after=stream.start) as again:
        replayed = await anext(again)
        assert isinstance(replayed, LiveEvent)
        assert replayed.id == found.id


async def test_changes_reach_their_tenant_once_the_source_has_begun(
    url: str, tmp_path: Path
) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, org_id uuid, at timestamptz)")
        async with changes_of_orders(url, tmp_path) as broker, broker.subscribe(ACME) as stream:
            for number, tenant in enumerate((OTHER, ACME)):
                conn.execute("insert into orders values (%s, %s, now())", (number, tenant))
            ((op, _, new),) = await changes(stream, 1)
    assert isinstance(new, dict)
    assert (op, new["id"], new["org_id"]) == ("insert", 1, ACME)


@asynccontextmanager
async def changes_of_orders(url: str, state_dir: Path) -> AsyncIterator[Broker]:
    """A broker on the changes of a table, which has begun."""
    async with Postgres(url, state_dir=state_dir) as pg:
        source = ChangeEvents(pg, "live", ["orders"])
        async with Broker(source, channels=["orders"]) as broker, asyncio.timeout(60):
            await broker._begun.wait()
            yield broker


async def test_a_transaction_with_many_changes_does_not_hold_the_loop(
    url: str, tmp_path: Path
) -> None:
    rows = scaled(300_000, least=20_000)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, org_id uuid)")
    async with (
        Postgres(url, state_dir=tmp_path) as pg,
        aclosing(ChangeEvents(pg, "live", ["orders"]).events()) as events,
    ):
        await anext(events)

        async def write() -> None:
            async with pg.connection() as other:
                await other.execute(
                    "insert into orders select n, %s from generate_series(1, %s) n "
                    "on conflict (id) do update set org_id = excluded.org_id",
                    (ACME, rows),
                )
                await other.commit()
            for _ in range(rows):
                await anext(events)

        assert not await holds(write)


async def test_a_row_that_changes_its_tenant_shows_each_tenant_its_own_row_only(
    url: str, tmp_path: Path
) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, org_id uuid)")
        conn.execute("alter table orders replica identity full")
        async with (
            changes_of_orders(url, tmp_path) as broker,
            broker.subscribe(ACME) as old,
            broker.subscribe(OTHER) as new,
        ):
            conn.execute("insert into orders values (1, %s)", (ACME,))
            conn.execute("update orders set org_id = %s", (OTHER,))
            acme, other = {"id": 1, "org_id": ACME}, {"id": 1, "org_id": OTHER}
            assert await changes(old, 2) == [("insert", None, acme), ("delete", acme, None)]
            assert await changes(new, 1) == [("insert", None, other)]
            conn.execute("truncate orders")
            for stream in (old, new):
                reset = await anext(stream)
                assert isinstance(reset, StreamReset)
                assert reset.reason == "the table orders was truncated"


async def changes(stream: LiveStream, count: int) -> list[tuple[str, object, object]]:
    """Return the changes that the next events report."""
    found = []
    for _ in range(count):
        event = await anext(stream)
        assert isinstance(event, LiveEvent), event
        body = json.loads(event.payload)
        found.append((body["op"], body["old"], body["new"]))
    return found
