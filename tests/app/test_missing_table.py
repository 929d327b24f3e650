"""A consumer whose table is dropped is degraded, and says so, until the table is there again."""

from __future__ import annotations

from pathlib import Path

import psycopg
from tests.reservoir.harness import until

from moored.app import App
from moored.postgres import Reset, Transaction
from moored.service import Config
from moored.testing import running_app

LIMIT = 60.0


async def test_a_consumer_waits_for_a_table_that_was_dropped(
    postgres_url: str, tmp_path: Path
) -> None:
    app, resets = App("orders", config=Config()), list[str]()
    pg = app.postgres(postgres_url, state_dir=tmp_path, stream_id="missing")

    @app.consumer(pg, "search", tables=["orders"])
    async def index(item: Transaction | Reset) -> None:
        if isinstance(item, Reset):
            resets.append(item.reason)

    def health() -> str:
        return app._running().view.parts()["consumer-search"]

    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
        await conn.execute("create table orders (id int primary key)")
        async with running_app(app, timeout=LIMIT):
            await until(lambda: health() == "active", "its table is published", LIMIT)
            await conn.execute("drop table orders")
            await until(lambda: health() == "degraded", "its table is gone", LIMIT)
            assert "waits for orders: " in app.explain("consumer-search")
            assert "so       create or rename the table" in app.explain("postgres")
            await conn.execute("create table orders (id int primary key)")
            await until(lambda: resets and health() == "active", "there is another one", LIMIT)
