"""An app parks the items that its consumers cannot handle, and goes on with the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from moored.app import App, AppError
from moored.postgres import Outbox, OutboxEvent, Parking, Postgres, Reset, Transaction
from moored.postgres.outbox import ddl
from moored.postgres.parking import list_parked, retry_parked
from moored.service import Config

LIMIT = 60.0
PART = "consumer-search"

Item = Transaction | OutboxEvent | Reset


class Search:
    """A function of a consumer that cannot handle some orders, and remembers the others."""

    def __init__(self, *poison: int) -> None:
        self.poison = set(poison)
        self.calls: list[int] = []
        self.handled: list[int] = []
        self.changed = asyncio.Event()

    async def __call__(self, item: Item) -> None:
        if isinstance(item, Reset):
            return
        if isinstance(item, OutboxEvent):
            number = item.json()
        else:
            (number,) = [change.new["id"] for change in item if change.new]
        self.calls.append(number)
        self.changed.set()
        if number in self.poison:
            raise ValueError(f"order {number} has no item")
        if isinstance(item, OutboxEvent):
            await item.ack()  # as a function does that stores the cursor with its effect
        self.handled.append(number)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for an effect in another task of the app."""
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def health(app: App) -> str:
    return app._running().view.parts()[PART]


class Orders:
    """A database with a table of orders, whose changes an app consumes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute("create table orders (id int primary key)")

    def app(self, search: Search, **options: Any) -> tuple[App, Postgres]:
        """Return an app whose consumer is ready when the app is."""
        app = App("orders", config=Config())
        pg = app.postgres(self.url, state_dir=self.folder, stream_id="app", pool_size=2)
        app.consumer(pg, "search", tables=["orders"], required=True, **options)(search)
        return app, pg

    async def insert(self, *numbers: int) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as conn:
            for number in numbers:
                await conn.execute("insert into orders values (%s)", (number,))


@pytest.fixture
def orders(postgres_url: str, tmp_path: Path) -> Orders:
    return Orders(postgres_url, tmp_path)


async def test_a_transaction_is_parked_after_its_tries_and_the_next_ones_are_handled(
    orders: Orders,
) -> None:
    search = Search(2)
    app, _ = orders.app(search, on_poison="park", tries=3)
    async with app:
        await app.ready(LIMIT)
        await orders.insert(1, 2, 3, 4)
        await until(lambda: search.handled == [1, 3, 4])
        assert search.calls == [1, 2, 2, 2, 3, 4]
        assert health(app) == "degraded"
        await app.ready(LIMIT)
        assert "order 2 has no item (ValueError)" in app.explain(PART)
        assert "moored consumers list" in app.explain(PART)


async def test_without_parking_the_next_transactions_wait(orders: Orders) -> None:
    search = Search(2)
    app, _ = orders.app(search)
    async with app:
        await app.ready(LIMIT)
        await orders.insert(1, 2, 3)
        await until(lambda: search.calls.count(2) > 2)
        assert search.handled == [1]
        search.poison.clear()
        await until(lambda: search.handled == [1, 2, 3])
    async with await psycopg.AsyncConnection.connect(orders.url) as conn:
        assert await list_parked(conn) == []


async def test_no_more_items_are_parked_than_allowed(orders: Orders) -> None:
    search = Search(*range(1, 10))
    app, _ = orders.app(search, on_poison="park", tries=1, max_parked=2)
    async with app:
        await app.ready(LIMIT)
        await orders.insert(*range(1, 6))
        await until(lambda: search.calls.count(3) > 1)
        await until(lambda: "no more than 2 parked items" in app.explain(PART))
        assert "order 3 has no item" in app.explain(PART)
        search.poison = {1, 2}
        await until(lambda: search.handled == [3, 4, 5])


async def test_what_was_parked_before_a_kill_is_not_handled_again(orders: Orders) -> None:
    search = Search(1)
    app, _ = orders.app(search, on_poison="park", tries=1)
    async with app:  # the publication, and the position of the consumer
        await app.ready(LIMIT)
    async with (
        Postgres(orders.url, state_dir=orders.folder, stream_id="app", pool_size=2) as pg,
        pg.changes("search", tables=["orders"]) as items,
    ):
        await pg.wait_until_published(timeout=LIMIT)
        await orders.insert(1)
        async with asyncio.timeout(LIMIT):
            item = await anext(items)
        assert isinstance(item, Transaction)
        parking = Parking.of(pg, "search")
        await parking.prepare()
        await parking.park(item, ValueError("order 1 has no item"))  # and no acknowledgement
    app, _ = orders.app(search, on_poison="park", tries=1)
    async with app:
        await app.ready(LIMIT)
        await orders.insert(2)
        await until(lambda: search.handled == [2])
        assert search.calls == [2]
        assert health(app) == "degraded"


async def test_a_retry_that_fails_keeps_the_item_and_one_that_succeeds_removes_it(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._consumer.LOOK", 0.02)
    search = Search(1)
    app, _ = orders.app(search, on_poison="park", tries=1)
    async with app, await psycopg.AsyncConnection.connect(orders.url, autocommit=True) as conn:
        await app.ready(LIMIT)
        await orders.insert(1)
        await until(lambda: health(app) == "degraded")
        (item,) = await list_parked(conn)
        await retry_parked(conn, [item.id])
        await until(lambda: search.calls == [1, 1])
        async with asyncio.timeout(LIMIT):
            while (await list_parked(conn))[0].tries < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        search.poison.clear()
        await retry_parked(conn, [item.id])
        await until(lambda: health(app) == "active")
        assert search.handled == [1]
        assert await list_parked(conn) == []


async def test_a_retry_is_taken_while_the_consumer_fails_again_and_again(orders: Orders) -> None:
    search = Search(1, 2)
    app, _ = orders.app(search, on_poison="park", tries=1, max_parked=1)
    async with app, await psycopg.AsyncConnection.connect(orders.url, autocommit=True) as conn:
        await app.ready(LIMIT)
        await orders.insert(1, 2)
        await until(lambda: search.calls.count(2) > 2)
        search.poison.remove(1)
        (item,) = await list_parked(conn)
        await retry_parked(conn, [item.id])
        await until(lambda: search.handled == [1])


async def test_a_consumer_of_an_outbox_parks_and_retries_events(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._consumer.LOOK", 0.02)
    search, app = Search(2), App("orders", config=Config())
    pg = app.postgres(postgres_url, state_dir=tmp_path, stream_id="app", pool_size=4)
    app.consumer(
        pg.outbox, "search", channels=["orders"], required=True, on_poison="park", tries=2
    )(search)
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(ddl().encode())
    async with app, await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as sql:
        await app.ready(LIMIT)
        for number in (1, 2, 3):
            await pg.outbox.publish(sql, "orders", number)
            await pg.outbox.publish(sql, "others", -number)
        await until(lambda: search.handled == [1, 3])
        assert search.calls == [1, 2, 2, 3]
        await until(lambda: health(app) == "degraded")
        assert "event" in app.explain(PART)
        (item,) = await list_parked(sql)
        search.poison.clear()
        await retry_parked(sql, [item.id])
        await until(lambda: health(app) == "active")
        assert search.handled == [1, 3, 2]


async def test_a_consumer_opens_the_outbox_of_a_pool(postgres_url: str) -> None:
    search, app = Search(), App("orders", config=Config())
    db = app.pool(postgres_url, name="db", min_size=1, max_size=3)
    outbox = Outbox(db, install=True)
    app.consumer(outbox, "search", after=["db"], required=True)(search)
    async with app, await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
        await app.ready(LIMIT)
        await outbox.publish(conn, "orders", 1)
        await until(lambda: search.handled == [1])
    assert not outbox.is_open


def test_options_that_do_not_fit_are_refused_with_all_mistakes(tmp_path: Path) -> None:
    app = App("orders", config=Config())
    pg = app.postgres("postgresql://app@db/orders", state_dir=tmp_path)
    with pytest.raises(ValueError, match=r"channels=\['a'\] .*; on_poison='skip' .*; tries=0 "):
        app.consumer(pg, "search", channels=["a"], on_poison="skip", tries=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tables="):
        app.consumer(pg.outbox, "search", tables=["orders"])
    with pytest.raises(AppError, match="not a part of the app"):
        app.consumer(Postgres("postgresql://app@db/orders", state_dir=tmp_path), "search")
