"""Publishing within the caller's own transaction, through each driver; capture by triggers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.soaking import some_of

from moored.postgres.outbox import Outbox, OutboxEvent
from moored.postgres.outbox._publish import encoded

from .conftest import Sql
from .reading import next_event

Work = Callable[[Any], Awaitable[None]]


async def stored(outbox: Outbox) -> list[OutboxEvent]:
    return (await outbox.read()).events


class Left(Exception):
    """Leaves a transaction, which is rolled back."""


@asynccontextmanager
async def psycopg_sync(url: str) -> AsyncIterator[Any]:
    with psycopg.connect(url) as conn:
        yield conn


@asynccontextmanager
async def psycopg_cursor(url: str) -> AsyncIterator[Any]:
    """As Django's cursors: `execute(query, values)`."""
    with psycopg.connect(url) as conn, conn.cursor() as cursor:
        yield cursor


@asynccontextmanager
async def psycopg_async(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url) as conn:
        yield conn


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Any]:
    conn = await asyncpg.connect(url)
    try:
        async with conn.transaction():
            yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as conn,
        conn.transaction(),
    ):
        yield conn


def dialect(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@asynccontextmanager
async def sqlalchemy_connection(url: str) -> AsyncIterator[Any]:
    engine = sqlalchemy.create_engine(dialect(url, "psycopg"))
    try:
        with engine.begin() as conn:
            yield conn
    finally:
        engine.dispose()


@asynccontextmanager
async def sqlalchemy_session(url: str) -> AsyncIterator[Any]:
    engine = sqlalchemy.create_engine(dialect(url, "psycopg"))
    try:
        with Session(engine) as session, session.begin():
            yield session
    finally:
        engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_connection(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(dialect(url, "asyncpg"))
    try:
        async with engine.begin() as conn:
            yield conn
    finally:
        await engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_session(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(dialect(url, "psycopg"))
    try:
        async with AsyncSession(engine) as session, session.begin():
            yield session
    finally:
        await engine.dispose()


DRIVERS = [
    psycopg_sync,
    psycopg_cursor,
    psycopg_async,
    asyncpg_connection,
    asyncpg_pool,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_async_connection,
    sqlalchemy_async_session,
]


@pytest.mark.parametrize("begin", DRIVERS, ids=lambda begin: begin.__name__)
async def test_an_event_exists_if_the_callers_transaction_commits(
    url: str, outbox: Outbox, begin: Callable[[str], Any]
) -> None:
    async def work(conn: Any, payload: Any, tenant: str | None) -> None:
        done = outbox.publish(conn, "orders", payload, tenant=tenant)
        if done is not None and hasattr(done, "__await__"):
            await done

    async with begin(url) as conn:
        await work(conn, {"total": 1.5, "name": "Zoë 100%"}, "acme")
        await work(conn, "as it is", None)
    with suppress(Left):
        async with begin(url) as conn:
            await work(conn, "rolled back", None)
            raise Left
    first, second = await stored(outbox)
    assert (first.json(), first.tenant) == ({"total": 1.5, "name": "Zoë 100%"}, "acme")
    assert (second.payload, second.tenant, second.channel) == ("as it is", None, "orders")


@pytest.mark.parametrize(
    "begin",
    some_of(DRIVERS, psycopg_cursor, asyncpg_connection, sqlalchemy_async_session),
    ids=lambda begin: begin.__name__,
)
async def test_an_event_is_acknowledged_within_the_callers_transaction(
    url: str, sql: Sql, outbox: Outbox, begin: Callable[[str], Any]
) -> None:
    for number in range(3):
        await outbox.publish(sql, "orders", str(number))
    async with outbox.consume("search") as events:
        async with begin(url) as conn:
            await (await next_event(events)).ack(conn)
        with suppress(Left):
            async with begin(url) as conn:
                await (await next_event(events)).ack(conn)
                raise Left
    async with outbox.consume("search") as events:
        assert (await next_event(events)).payload == "1"


async def test_sql_of_other_languages_publishes(sql: Sql, outbox: Outbox) -> None:
    await sql.execute("select moored.outbox_publish('orders', 'by function')")
    await sql.execute("insert into moored.outbox (channel, payload) values ('orders', 'by insert')")
    assert [event.payload for event in await stored(outbox)] == ["by function", "by insert"]


async def test_a_payload_of_a_megabyte_arrives_whole(sql: Sql, outbox: Outbox) -> None:
    large = "".join(chr(0x20 + n % 0x2000) for n in range(1_000_000))
    for _ in range(4):
        await outbox.publish(sql, "orders", large)
    batch = await outbox.read()
    assert 1 <= len(batch.events) < 4, "a page is limited in bytes, too"
    async with outbox.consume("search") as events:
        for _ in range(4):
            assert (await next_event(events)).payload == large


async def test_a_mistake_does_not_abort_the_callers_transaction(sql: Sql, outbox: Outbox) -> None:
    async with sql.transaction():
        with pytest.raises(ValueError, match="channel='' must be a str"):
            outbox.publish(sql, "", "x")
        with pytest.raises(ValueError, match="must not contain NUL"):
            outbox.publish(sql, "orders", "a\0b")
        with pytest.raises(TypeError, match="encode bytes as base64"):
            outbox.publish(sql, "orders", b"x")
        await outbox.publish(sql, "orders", "fine")
    assert [event.payload for event in await stored(outbox)] == ["fine"]


@pytest.mark.parametrize(
    ("payload", "text"),
    [("é", "é"), (None, "null"), ({"a": "é"}, '{"a":"é"}'), ([1, True], "[1,true]")],
)
def test_other_values_than_strings_are_json(payload: Any, text: str) -> None:
    assert encoded(payload) == text


async def test_capture_publishes_every_change_of_a_table(sql: Sql, outbox: Outbox) -> None:
    await sql.execute("drop schema if exists shop cascade")
    await sql.execute(
        'create schema shop create table "Orders" (id int primary key, org text, note text)'
    )
    await outbox.capture("shop.Orders", channel="orders", tenant_column="org")
    await outbox.capture("shop.Orders", channel="orders", tenant_column="org")
    await sql.execute("insert into shop.\"Orders\" values (1, 'acme'), (2, 'other')")
    await sql.execute("update shop.\"Orders\" set note = 'paid' where id = 2")
    await sql.execute('delete from shop."Orders" where id = 1')
    await sql.execute('truncate shop."Orders"')
    await outbox.uncapture("shop.Orders")
    await sql.execute("insert into shop.\"Orders\" values (3, 'acme')")
    found = await stored(outbox)
    changes = [json.loads(event.payload) for event in found]
    assert [each["op"] for each in changes] == ["insert", "insert", "update", "delete", "truncate"]
    assert {each["table"] for each in changes} == {"shop.Orders"}
    assert changes[2]["old"] == {"id": 2, "org": "other", "note": None}
    assert changes[2]["new"] == {"id": 2, "org": "other", "note": "paid"}
    assert [event.tenant for event in found] == ["acme", "other", "other", "acme", None]


@pytest.mark.parametrize(("before", "after"), [("acme", "other"), (None, "other"), ("acme", None)])
async def test_a_row_that_changes_its_tenant_is_deleted_for_one_and_inserted_for_the_other(
    sql: Sql, outbox: Outbox, before: str | None, after: str | None
) -> None:
    await sql.execute("create table orders (id int, org text)")
    await sql.execute("insert into orders values (1, %s)", (before,))
    await outbox.capture("orders", tenant_column="org")
    await sql.execute("update orders set org = %s", (after,))
    old, new = {"id": 1, "org": before}, {"id": 1, "org": after}
    assert [
        (event.tenant, event.json()["op"], event.json()["old"], event.json()["new"])
        for event in await stored(outbox)
    ] == [(before, "delete", old, None), (after, "insert", None, new)]


async def test_capture_needs_no_privileges_of_the_writer(
    url: str, sql: Sql, outbox: Outbox
) -> None:
    await sql.execute("create table orders (id int)")
    await outbox.capture("orders")
    await sql.execute("drop role if exists writer")
    await sql.execute("create role writer")
    await sql.execute("grant insert on orders to writer")
    async with sql.transaction():
        await sql.execute("set local role writer")
        await sql.execute("insert into orders values (1)")
    await sql.execute("drop owned by writer; drop role writer")
    (event,) = await stored(outbox)
    assert event.channel == "orders"
