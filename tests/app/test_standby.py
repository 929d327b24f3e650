"""Of several replicas of an app, the one that has the stream runs the consumers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.reservoir.harness import until

from moored.app import App
from moored.kernel import Backoff
from moored.postgres import Outbox, OutboxEvent, Postgres, Reset, Transaction
from moored.postgres.parking import list_parked, retry_parked
from moored.service import Config

LIMIT = 60.0


class Replica:
    """An app that consumes an outbox of its Postgres."""

    def __init__(self, url: str, state: Path, **settings: Any) -> None:
        self.app = App("orders", config=Config())
        settings |= {"state_dir": state, "stream_id": "replicas", "pool_size": 2}
        self.pg = self.app.postgres(url, **settings)
        self.outbox = Outbox(self.pg, schema="events", install=True)
        self.poison: set[int] = set()
        self.calls: list[int] = []
        self.handled: list[int] = []
        self.resume = asyncio.Event()
        self.resume.set()
        #: The function ends after it was cancelled only when this is set.
        self.leave = asyncio.Event()
        self.leave.set()
        options: dict[str, Any] = {"on_poison": "park", "tries": 1}
        self.app.consumer(self.outbox, "mail", **options)(self.mail)

    async def mail(self, event: OutboxEvent | Reset) -> None:
        if isinstance(event, OutboxEvent):
            self.calls.append(event.json())
            try:
                await self.resume.wait()
            finally:
                await self.leave.wait()
            if event.json() in self.poison:
                raise ValueError(f"mail {event.json()} has no address")
            self.handled.append(event.json())

    @property
    def health(self) -> str:
        return self.app._running().view.parts()["consumer-mail"]

    async def is_now(self, health: str) -> None:
        await until(
            lambda: self.health == health, f"{health}: {self.app.explain('consumer-mail')}", LIMIT
        )

    async def publish(self, *numbers: int) -> None:
        async with self.pg.connection() as conn:
            for number in numbers:
                await self.outbox.publish(conn, "mail", number)


def state(app: App) -> str:
    """Return the health of a consumer of changes."""
    return app._running().view.parts()["consumer-search"]


async def retry_all(url: str) -> None:
    """Ask for a retry of every parked item."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await retry_parked(conn, [each.id for each in await list_parked(conn)])


async def terminate_lock_holder(url: str) -> None:
    """End the connection of the replica that streams, so that another one does."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
        )


@pytest.fixture
def replicas(postgres_url: str, tmp_path: Path) -> tuple[Replica, Replica]:
    return Replica(postgres_url, tmp_path / "first"), Replica(postgres_url, tmp_path / "second")


async def test_an_outbox_of_a_postgres_is_consumed_by_the_replica_that_streams(
    replicas: tuple[Replica, Replica], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parked items are retried there, and when it stops, the other one goes on."""
    monkeypatch.setattr("moored.app._consumer.LOOK", 0.02)
    first, second = replicas
    first.poison.add(2)
    async with AsyncExitStack() as outer, AsyncExitStack() as inner:
        await inner.enter_async_context(first.app)
        await first.is_now("active")
        await outer.enter_async_context(second.app)
        await second.is_now("waiting")
        assert "standby of backend" in second.app.explain("consumer-mail")
        await first.publish(1, 2, 3)
        await until(lambda: first.handled == [1, 3], "both are handled", LIMIT)
        await first.is_now("degraded")
        first.poison.clear()
        await retry_all(postgres_url)
        await until(lambda: first.handled == [1, 3, 2], "the parked one is handled", LIMIT)
        await inner.aclose()
        await second.is_now("active")
        await second.publish(4)
        await until(lambda: second.handled == [4], "the other one goes on", LIMIT)


async def test_a_standby_that_could_sleep_does_not_consume(
    postgres_url: str, tmp_path: Path
) -> None:
    """When it woke up, it consumed until it knew of the other one."""
    first, second = (
        Replica(postgres_url, tmp_path / name, sleep_after=after)
        for name, after in (("first", None), ("second", 0.2))
    )
    seen = set[str]()
    async with first.app:
        await first.is_now("active")
        async with second.app:
            await second.is_now("waiting")
            second.pg.monitor.subscribe(lambda change: seen.add(change.status.conn.value))
            for number in range(40):
                await first.publish(number)
                await until(lambda: first.calls[-1:] == [number], "it is handled", LIMIT)  # noqa: B023
                await asyncio.sleep(0.05)
            assert second.health == "waiting"
            assert second.calls == []
    assert "sleeping" not in seen


async def test_a_standby_whose_outbox_was_opened_late_says_that_it_stands_by(
    replicas: tuple[Replica, Replica], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._shared_outbox.RETRY", Backoff(0.05, 0.2))
    first, second = replicas
    async with first.app:
        await first.is_now("active")
        async with await psycopg.AsyncConnection.connect(postgres_url) as held:
            # An installation that changes something waits for it, and fails.
            await held.execute("drop function events.outbox_store; lock events.outbox_cursors")
            monkeypatch.setattr("moored.postgres.outbox._reader.LOCK_TRIES", 1)
            async with second.app:
                explain = second.app.explain
                await until(lambda: "cannot be changed" in explain("consumer-mail"), "no", LIMIT)
                await held.rollback()
                await second.is_now("waiting")


async def test_a_replica_that_has_lost_the_stream_consumes_no_more(
    replicas: tuple[Replica, Replica], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._consumer.LOOK", 0.02)
    first, second = replicas
    first.poison = second.poison = {1, 2}
    async with first.app, second.app:
        await until(lambda: "waiting" in (first.health, second.health), "one stands by", LIMIT)
        if first.health == "waiting":
            first, second = second, first
        await first.is_now("active")
        await first.publish(1, 2)
        explain = first.app.explain
        await until(lambda: "2 items parked" in explain("consumer-mail"), "parked", LIMIT)
        first.resume.clear()
        await first.publish(3)
        await until(lambda: first.calls == [1, 2, 3], "it has the third", LIMIT)
        await terminate_lock_holder(postgres_url)
        await until(lambda: second.handled == [3], "the other one has it, too", LIMIT)
        await first.is_now("waiting")
        assert "standby of backend" in first.app.explain("consumer-mail")
        first.resume.set()
        second.poison.clear()
        await retry_all(postgres_url)
        await until(lambda: second.handled == [3, 1, 2], "the parked ones are handled", LIMIT)
        assert first.calls == [1, 2, 3]
        assert first.handled == []


async def test_a_replica_that_has_the_stream_again_before_its_function_has_ended_goes_on(
    replicas: tuple[Replica, Replica], postgres_url: str
) -> None:
    first, second = replicas
    async with first.app:
        await first.is_now("active")
        first.resume.clear()
        first.leave.clear()
        async with second.app:
            await second.is_now("waiting")
            await first.publish(1)
            await until(lambda: first.calls == [1], "the first has it", LIMIT)
            await terminate_lock_holder(postgres_url)
            await until(lambda: second.handled == [1], "the other one has it, too", LIMIT)
            await until(lambda: bool(first.pg.standby_of), "the first stands by", LIMIT)
        await first.pg.wait_until_active(LIMIT)
        first.resume.set()
        first.leave.set()
        await first.publish(2)
        await until(lambda: first.handled == [2], first.app.explain("consumer-mail"), LIMIT)


async def test_a_consumer_that_stood_by_goes_on_where_the_other_has_stopped(
    postgres_url: str, tmp_path: Path
) -> None:
    """Also with a state directory of its own: the slot has what was not acknowledged."""

    def made(name: str) -> tuple[App, Postgres, list[Any]]:
        app, items = App(name, config=Config()), list[Any]()
        pg = app.postgres(postgres_url, state_dir=tmp_path / name, stream_id="replicas")

        @app.consumer(pg, "search", tables=["orders"], on_poison="park")
        async def index(item: Transaction | Reset) -> None:
            items.append(
                "reset" if isinstance(item, Reset) else [row.new and row.new["id"] for row in item]
            )
            if name == "first":
                await asyncio.Event().wait()

        return app, pg, items

    (first, _, taken), (second, pg, handled) = made("first"), made("second")
    async with (
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
        AsyncExitStack() as outer,
        AsyncExitStack() as inner,
    ):
        await conn.execute("create table orders (id int primary key)")
        await inner.enter_async_context(first)
        await until(lambda: state(first) == "active", "the first streams", LIMIT)
        await outer.enter_async_context(second)
        await until(lambda: state(second) == "waiting", "the second stands by", LIMIT)
        await conn.execute("insert into orders values (1)")
        await until(lambda: bool(taken), "the first has it", LIMIT)
        await conn.execute("insert into orders values (2)")
        async with conn.transaction():
            await conn.execute("lock table moored.parked")  # so its stream begins before it reads
            await inner.aclose()
            await pg.wait_until_active(LIMIT)
        await until(lambda: len(handled) == 2, "the second has both", LIMIT)
    assert handled == [[1], [2]]
