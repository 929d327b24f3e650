"""From an outbox in a real PostgreSQL over HTTP: nothing lost, nothing twice, order kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from tests.broker.serving import ACME, KEYS, OTHER, reading, served
from tests.servers import empty_database, free_port

from moored.broker import ApiKeys, Broker, BrokerApp, LiveEvent, StreamReset
from moored.broker.postgres import ChangeEvents, OutboxEvents
from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Postgres
from moored.postgres.outbox import Outbox, _wakes, ddl
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


async def write(url: str, outbox: Outbox, writer: int, count: int) -> None:
    """Publish events in transactions that are open for a while, and so commit out of order."""
    tenant = (ACME, OTHER)[writer % 2]
    async with await psycopg.AsyncConnection.connect(url) as conn:
        for number in range(count):
            async with conn.transaction():
                body = {"org_id": tenant, "writer": writer, "number": number}
                await outbox.publish(conn, "orders", body, tenant=tenant)
                await asyncio.sleep(random.uniform(0, 0.03))


class Client:
    """A client that leaves again and again, and comes back at any node."""

    def __init__(self, key: str, ports: list[int]) -> None:
        self._key = key
        self._ports = ports
        self.got: list[tuple[int, int]] = []
        self._last = ""

    async def run(self, start: str, count: int) -> None:
        self._last = start
        while len(self.got) < count:
            url = f"http://127.0.0.1:{random.choice(self._ports)}"
            try:
                await self._read(url, min(count, len(self.got) + random.randint(1, 20)))
            except (httpx.HTTPError, AssertionError):
                await asyncio.sleep(0.05)  # the node is down

    async def _read(self, url: str, until: int) -> None:
        headers = {"Last-Event-ID": self._last} if self._last else {}
        async with reading(url, self._key, headers=headers) as events:
            while len(self.got) < until:
                found = await events.next()
                if found is None:
                    return
                if found.event != "orders":
                    raise ValueError(f"not an event: {found}")
                body = found.json()
                self.got.append((body["writer"], body["number"]))
                assert found.id is not None
                self._last = found.id


async def serve(url: str, port: int) -> None:
    """Serve a node on a port, and restart it twice."""
    for pause in (random.uniform(0.3, 1.0), random.uniform(0.3, 1.0), 600):
        async with node(url) as broker, served(BrokerApp(broker, ApiKeys(KEYS)), port):
            await asyncio.sleep(pause)


async def test_clients_that_change_nodes_over_restarts_get_every_event_once(url: str) -> None:
    count = scaled(500, least=10)
    ports = [free_port(), free_port()]
    clients = [Client(key, ports) for key in ("acme-key", "other-key") * 3]
    async with Outbox(url) as outbox, asyncio.timeout(200):
        start = await first_id(url, outbox)
        serving = [asyncio.ensure_future(serve(url, port)) for port in ports]
        try:
            async with asyncio.TaskGroup() as group:
                for writer in range(8):
                    group.create_task(write(url, outbox, writer, count))
                for client in clients:
                    group.create_task(client.run(start, 4 * count))
        finally:
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)
    for number, client in enumerate(clients):
        assert len(client.got) == len(set(client.got)) == 4 * count, "an event came twice"
        for writer in range(number % 2, 8, 2):
            found = [each for by, each in client.got if by == writer]
            assert found == list(range(count)), "the order is not kept"
        assert client.got == clients[number % 2].got, "the order differs between clients"


async def first_id(url: str, outbox: Outbox) -> str:
    """Publish an event, and return its id."""
    async with node(url) as broker, broker.subscribe(ACME) as stream:
        await publish_start(url, outbox)
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        return found.id


async def publish_start(url: str, outbox: Outbox) -> None:
    async with await psycopg.AsyncConnection.connect(url) as conn:
        await outbox.publish(conn, "orders", {"org_id": ACME}, tenant=ACME)


async def test_event_whose_payload_names_another_tenant_is_dropped(url: str) -> None:
    async with node(url) as broker, Outbox(url) as outbox, broker.subscribe(OTHER) as stream:
        async with await psycopg.AsyncConnection.connect(url) as conn:
            await outbox.publish(conn, "orders", {"org_id": OTHER}, tenant=ACME)
            await outbox.publish(conn, "orders", {"org_id": OTHER, "number": 2}, tenant=OTHER)
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        assert json.loads(found.payload)["number"] == 2
        assert broker.statistics().dropped == {"other_tenant": 1}


async def test_dropped_history_and_a_foreign_cursor_are_resets(url: str) -> None:
    async with node(url) as broker, Outbox(url) as outbox:
        system, _, rest = (await first_id(url, outbox)).partition("-")
        for after in (f"{int(system) + 1}-{rest}", "nonsense"):
            async with broker.subscribe(ACME, after=after) as stream, asyncio.timeout(30):
                assert isinstance(await anext(stream), StreamReset)


async def test_changes_of_a_table_reach_their_tenant(url: str, tmp_path: Path) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, org_id uuid, at timestamptz)")
        async with Postgres(url, state_dir=tmp_path) as pg:
            source = ChangeEvents(lambda: pg.changes(consumer="live", tables=["orders"]))
            async with (
                Broker(source, channels=["orders"]) as broker,
                broker.subscribe(ACME) as stream,
                asyncio.timeout(60),
            ):
                found = None
                number = 0
                while not isinstance(found, LiveEvent):
                    for tenant in (OTHER, ACME):
                        number += 1
                        conn.execute("insert into orders values (%s, %s, now())", (number, tenant))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            found = await anext(stream)
    change = json.loads(found.payload)
    assert (change["op"], change["new"]["org_id"]) == ("insert", ACME)
