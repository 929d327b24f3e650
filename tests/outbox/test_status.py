"""Size, age, lags, and the transaction that holds delivery back; metrics; privileges."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.postgres.server import until

from moored.postgres.outbox import Outbox, _outbox, ddl, grants
from moored.postgres.outbox.prometheus import OutboxCollector

from .conftest import Sql
from .reading import payloads, publishing


async def test_the_culprit_of_held_back_events_is_reported(url: str, sql: Sql) -> None:
    outbox = Outbox(url, show_queries=True)
    async with outbox, publishing(url) as culprit:
        assert (await outbox.status()).held_back is None, "it holds nothing back yet"
        await culprit.execute("set application_name = 'importer'")
        await culprit.execute("select 'secret', 42")
        await outbox.publish(sql, "orders", "1")
        held = (await outbox.status()).held_back
        assert held is not None
        assert held.pid == culprit.info.backend_pid
        assert held.application == "importer"
        assert held.query == "select …, …"
        assert held.age is not None
        assert held.age >= held.waiting >= 0.0
        assert held.database == sql.info.dbname
        database = f"in database {held.database!r}"
        assert f'of backend {held.pid} {database} (application "importer"), open for' in str(held)
        await culprit.rollback()
        assert (await outbox.status()).held_back is None


async def test_a_statement_is_hidden_unless_it_is_asked_for(
    url: str, sql: Sql, outbox: Outbox
) -> None:
    async with publishing(url):
        await outbox.publish(sql, "orders", "1")
        held = (await outbox.status()).held_back
        assert held is not None
        assert held.query == ""


async def test_a_long_hold_is_logged_once(
    url: str, sql: Sql, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_outbox, "WATCH_EVERY", 0.02)
    monkeypatch.setattr(_outbox, "HELD_TOO_LONG", 0.1)

    async def logged() -> bool:
        return "delivery is held back" in caplog.text

    with caplog.at_level(logging.WARNING, "moored.postgres"):
        async with Outbox(url) as outbox, publishing(url) as culprit:
            await outbox.publish(sql, "orders", "1")
            await until(logged)
            seen = outbox.last_status
            await until(lambda: _later(outbox, seen))
            await culprit.rollback()
    assert caplog.text.count("delivery is held back") == 1


async def _later(outbox: Outbox, seen: Any) -> bool:
    return outbox.last_status is not seen


async def test_lags_and_sizes(sql: Sql, outbox: Outbox) -> None:
    status = await outbox.status()
    assert (status.oldest, status.consumers, status.partitions) == (None, (), 5)
    async with outbox.consume("search") as events:
        for number in range(3):
            await outbox.publish(sql, "orders", str(number))
        assert await payloads(events, 2) == ["0", "1"]
    status = await outbox.status()
    assert status.oldest is not None
    (consumer,) = status.consumers
    assert consumer.lag > 0.0
    assert status.bytes > 0
    assert str(status).endswith("1 consumer")
    await outbox.drop_consumer("search")
    assert (await outbox.status()).consumers == ()


async def test_metrics(url: str, sql: Sql, outbox: Outbox) -> None:
    registry = CollectorRegistry()
    registry.register(OutboxCollector(outbox))
    async with publishing(url) as culprit, outbox.consume("search"):
        await outbox.publish(sql, "orders", "1")
        await outbox.status()
        text = generate_latest(registry).decode()
        pid = culprit.info.backend_pid
    assert 'moored_outbox_bytes{schema="moored"}' in text
    assert (
        f'moored_outbox_held_back_transaction_seconds{{application="",pid="{pid}",prepared="",'
        in text
    )
    assert 'moored_outbox_consumer_lag_seconds{consumer="search",schema="moored"}' in text
    assert 'moored_outbox_listener_up{schema="moored"} 0.0' in text


async def test_grants_suffice_for_a_role_that_publishes_and_consumes(url: str, sql: Sql) -> None:
    await sql.execute("drop role if exists app")
    await sql.execute("create role app login password 'app'")
    await sql.execute(grants("app").encode())
    mine = psycopg.conninfo.make_conninfo(url, user="app", password="app")
    async with Outbox(mine) as outbox, await psycopg.AsyncConnection.connect(mine) as conn:
        await outbox.publish(conn, "orders", "1")
        await conn.commit()
        async with outbox.consume("search") as events:
            assert await payloads(events, 1) == ["1"]
        assert await outbox.upkeep() == (0, 0)
        async with publishing(url) as culprit:
            await outbox.publish(conn, "orders", "2")
            await conn.commit()
            held = (await outbox.status()).held_back
            assert held is not None
            assert held.pid == culprit.info.backend_pid
    await sql.execute("drop owned by app; drop role app")


async def test_installing_again_keeps_events_and_cursors(
    url: str, sql: Sql, outbox: Outbox
) -> None:
    await outbox.publish(sql, "orders", "1")
    await outbox.publish(sql, "orders", "2")
    async with outbox.consume("search") as events:
        await payloads(events, 1)
    await outbox.install()
    await sql.execute(ddl().encode())
    async with outbox.consume("search") as events:
        assert await payloads(events, 1) == ["2"]


def test_mistakes_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"Outbox: retain=0 .*; max_bytes=-1 .*; partition=0.1 "):
        Outbox("postgresql://db", retain=0, max_bytes=-1, partition=0.1)
    with pytest.raises(ValueError, match="schema='My schema' must consist of"):
        Outbox("postgresql://db", schema="My schema")


def test_repr_says_whether_it_is_open() -> None:
    assert repr(Outbox("postgresql://db")) == "<Outbox in schema moored: not open>"
