"""A publisher that stays open is named by every part whose events wait for its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from tests.outbox.reading import publishing
from tests.reservoir.harness import until

from moored.app import App
from moored.postgres import Outbox
from moored.postgres.outbox import ddl
from moored.service import Config

#: Seconds within which everything here happens, on a busy machine too.
LIMIT = 60.0


@pytest.fixture
def url(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with an outbox, where what is held back is told at once."""
    monkeypatch.setattr("moored.postgres.outbox._outbox.WATCH_EVERY", 0.02)
    monkeypatch.setattr("moored.postgres.outbox._outbox.HELD_TOO_LONG", 0.01)
    monkeypatch.setattr("moored.app._consumer.LOOK", 0.02)
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute(ddl(wake="poll").encode())
    return postgres_url


async def check_naming(app: App, url: str, *parts: str) -> None:
    """Hold events back, and verify that these parts name the publisher until it ends."""

    def health() -> list[str]:
        return [app._running().view.parts()[part] for part in parts]

    async with app, asyncio.timeout(LIMIT):
        await app.ready()
        await until(lambda: {*health()} == {"active"}, "all parts work", LIMIT)
        async with (
            publishing(url) as culprit,
            await psycopg.AsyncConnection.connect(url, autocommit=True) as sql,
        ):
            await sql.execute("select moored.outbox_publish('orders', 'waits')")
            who = (
                f"for the end of the transaction of backend {culprit.info.backend_pid} in database"
            )
            so = f"commit it, or run SELECT pg_terminate_backend({culprit.info.backend_pid})"
            for part in parts:
                await until(lambda: who in app.explain(part), f"{part} tells it", LIMIT)  # noqa: B023
                assert so in app.explain(part)
            await until(lambda: {*health()} == {"degraded"}, "the health says so", LIMIT)
            await app.ready()
            await culprit.rollback()
        await until(lambda: {*health()} == {"active"}, "nothing is held back", LIMIT)


async def test_a_broker_alone_names_the_publisher(url: str, tmp_path: Path) -> None:
    app = App("orders", config=Config())
    pg = app.postgres(url, name="pg", state_dir=tmp_path, pool_size=2)
    app.broker(pg.outbox, name="live", required=True)
    await check_naming(app, url, "live", "pg")


async def test_a_consumer_of_the_outbox_of_a_pool_names_the_publisher(url: str) -> None:
    app = App("orders", config=Config())
    db = app.pool(url, name="db", max_size=4)
    app.consumer(Outbox(db), "mailer", required=True, name="mailer")(_ignore)
    await check_naming(app, url, "mailer")


async def test_the_postgres_whose_outbox_a_component_reads_names_the_publisher(
    url: str, tmp_path: Path
) -> None:
    app = App("orders", config=Config())
    pg = app.postgres(url, name="pg", state_dir=tmp_path, pool_size=2)

    @app.component(after=["pg"])
    async def read(_: object) -> None:
        async for _ in pg.outbox.tail():
            pass

    await check_naming(app, url, "pg")


async def _ignore(_: object) -> None:
    pass
