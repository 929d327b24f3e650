"""The outbox of a pool or of a URL is opened once, for all parts of an app that read it."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from tests.reservoir.harness import until

from moored.app import App
from moored.broker import LiveEvent
from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Backoff
from moored.postgres import Outbox, OutboxEvent, Postgres, Reset
from moored.service import Config
from moored.testing import running_app

#: Seconds within which everything here happens, on a busy machine too.
LIMIT = 60.0


def health(app: App) -> dict[str, str]:
    return dict(app._running().view.parts())


class Mails:
    """A function of a consumer that remembers the events."""

    def __init__(self) -> None:
        self.events: list[OutboxEvent] = []

    async def __call__(self, item: OutboxEvent | Reset) -> None:
        if isinstance(item, OutboxEvent):
            self.events.append(item)


@pytest.mark.parametrize("after", [["db"], []])
async def test_a_broker_and_two_consumers_read_one_outbox_of_a_pool(
    postgres_url: str, after: list[str]
) -> None:
    app, mail, text = App("orders", config=Config()), Mails(), Mails()
    db = app.pool(postgres_url, name="db", max_size=6)
    outbox = Outbox(db, install=True, wake="poll")
    app.consumer(outbox, "mail", after=after)(mail)
    live = app.broker(outbox, after=after, canonical=str)
    app.consumer(outbox, "text", after=after)(text)
    async with running_app(app, timeout=LIMIT), asyncio.timeout(LIMIT):
        await until(lambda: {*health(app).values()} == {"active"}, "all parts work", LIMIT)
        async with live.subscribe("acme") as events:
            async with db.connection() as conn:
                await outbox.publish(conn, "orders", {"id": 1}, tenant="acme")
            while not isinstance(await anext(events), LiveEvent):
                pass
        await until(lambda: mail.events and text.events, "both consumers have it", LIMIT)
        for part in ("broker", "consumer-mail", "consumer-text"):
            assert "restarts" not in app.explain(part)
    assert not outbox.is_open


async def test_a_degraded_standby_does_not_consume_the_outbox_of_its_postgres(
    postgres_url: str, tmp_path: Path
) -> None:
    def made(name: str, **settings: Any) -> tuple[App, Postgres, Mails]:
        app, mail = App(name, config=Config()), Mails()
        pg = app.postgres(postgres_url, state_dir=tmp_path / name, stream_id="two", **settings)
        app.consumer(pg.outbox, "mail")(mail)
        return app, pg, mail

    async with Outbox(postgres_url, install=True):
        pass
    app, pg, mail = made("first")
    second, _, rest = made("second", notify_url=make_conninfo(postgres_url, port=1))
    async with AsyncExitStack() as running, asyncio.timeout(LIMIT):
        await running.enter_async_context(app)
        await app.ready()
        async with second:
            await until(lambda: health(second)["postgres"] == "degraded", "no listener", LIMIT)
            await until(lambda: health(second)["consumer-mail"] == "waiting", "it waits", LIMIT)
            assert "another instance has the change stream" in second.explain("consumer-mail")
            async with pg.connection() as conn:
                await pg.outbox.publish(conn, "mail", 1)
            await until(lambda: mail.events, "the event is handled", LIMIT)
            await running.aclose()
            await until(lambda: health(second)["consumer-mail"] == "active", "it goes on", LIMIT)
            async with await psycopg.AsyncConnection.connect(postgres_url) as conn:
                await pg.outbox.publish(conn, "mail", 2)
            await until(lambda: rest.events, "the next event is handled", LIMIT)
    assert [event.json() for event in mail.events + rest.events] == [1, 2]


@pytest.mark.parametrize("ends", [True, False])
async def test_at_a_stop_a_function_may_end_and_then_its_event_does_not_come_again(
    postgres_url: str, ends: bool
) -> None:
    begun, calls, ended = asyncio.Event(), list[int](), list[int]()

    def made() -> App:
        app = App("orders", config=Config())

        @app.consumer(Outbox(postgres_url, install=True, wake="poll"), "mail", required=True)
        async def mail(event: OutboxEvent | Reset) -> None:
            assert isinstance(event, OutboxEvent)
            calls.append(event.json())
            begun.set()
            if len(calls) == 1:
                await asyncio.sleep(0.2 if ends else math.inf)
            ended.append(event.json())

        return app

    async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
        sql = await psycopg.AsyncConnection.connect(postgres_url, autocommit=True)
        await stack.enter_async_context(sql)
        outbox = Outbox(postgres_url)
        async with made() as app:
            await app.ready()
            await outbox.publish(sql, "mail", 1)
            await begun.wait()
        async with made() as app:
            await app.ready()
            await outbox.publish(sql, "mail", 2)
            await until(lambda: ended == [1, 2], f"both are handled: {ended}", LIMIT)
    assert calls == ([1, 2] if ends else [1, 1, 2])


@pytest.fixture
async def stranger(postgres_url: str) -> AsyncIterator[tuple[str, sql.Identifier]]:
    """The URL of a role that may not create a schema, and its name."""
    name = f"stranger_{secrets.token_hex(4)}"
    role = sql.Identifier(name)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
        await conn.execute(sql.SQL("create role {} login password 'secret'").format(role))
        yield make_conninfo(postgres_url, user=name, password="secret"), role
        await conn.execute(sql.SQL("drop owned by {} cascade").format(role))
        await conn.execute(sql.SQL("drop role {}").format(role))


async def test_an_outbox_that_cannot_be_installed_yet_is_opened_later(
    postgres_url: str, stranger: tuple[str, sql.Identifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.app._shared_outbox.RETRY", Backoff(0.05, 0.2))
    url, role = stranger
    app, mail = App("orders", config=Config()), Mails()
    outbox = Outbox(url, install=True, wake="poll")
    app.consumer(outbox, "mail")(mail)
    app.consumer(outbox, "text", on_poison="park")(mail)
    app.broker(outbox, canonical=str)
    async with (
        running_app(app, timeout=LIMIT),
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
    ):
        for part in ("consumer-mail", "consumer-text", "broker"):
            again = re.compile(r"^  restarts [2-9]", re.MULTILINE)
            await until(lambda: again.search(app.explain(part)), f"{part} is retried", LIMIT)  # noqa: B023
            assert "permission denied for database" in app.explain(part)
            assert health(app)[part] == "starting"
        await conn.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(conn.info.dbname), role
            )
        )
        await until(lambda: {*health(app).values()} == {"active"}, "all parts work", LIMIT)
        await outbox.publish(conn, "mail", 1)
        await until(lambda: mail.events, "the event is handled", LIMIT)


async def test_an_app_starts_while_the_database_of_an_outbox_is_down() -> None:
    with SyncEmbeddedPostgres() as server:
        app, mail = App("orders", config=Config()), Mails()
        outbox = Outbox(server.url, install=True, wake="poll")
        app.consumer(outbox, "mail")(mail)
        app.consumer(outbox, "required", name="required", required=True)(mail)
        server.kill()
        async with app:  # the parts after it, and HTTP, start as well
            assert app.status == "starting"
            assert "the outbox is not open yet" in app.explain("consumer-mail")
            server.start()
            await app.ready(LIMIT)
            await until(lambda: {*health(app).values()} == {"active"}, "all parts work", LIMIT)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_consumer_whose_cursor_was_moved_is_active_again(
    postgres_url: str, fails: bool
) -> None:
    app, calls = App("orders", config=Config()), []
    db = app.pool(postgres_url, name="db", max_size=6)
    outbox = Outbox(db, install=True, wake="poll")

    @app.consumer(outbox, "mail", after=["db"])
    async def mail(event: OutboxEvent | Reset) -> None:
        assert isinstance(event, OutboxEvent)
        calls.append(event.json())
        if calls == [1]:  # the same consumer in another process
            async with outbox.consume("mail", start="oldest") as other:
                for _ in range(2):
                    item = await anext(other)
                    assert isinstance(item, OutboxEvent)
                    await item.ack()
            if fails:
                raise ValueError("the mail server is down")

    async with running_app(app, timeout=LIMIT), asyncio.timeout(LIMIT):
        await until(lambda: health(app)["consumer-mail"] == "active", "it is ready", LIMIT)
        async with db.connection() as conn:
            await outbox.publish(conn, "mail", 1)
            await outbox.publish(conn, "mail", 2)
        await until(lambda: "restarts 1" in app.explain("consumer-mail"), "it was replaced", LIMIT)
        await until(lambda: health(app)["consumer-mail"] == "active", "it is ready again", LIMIT)
        async with db.connection() as conn:
            await outbox.publish(conn, "mail", 3)
        await until(lambda: calls == [1, 3], "it goes on", LIMIT)
