"""The outbox of the service's database: in its status, its explanation and its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.reservoir.harness import until
from tests.service.test_database import service

from moored.postgres.outbox import _outbox, ddl

from .reading import LIMIT, payloads, publishing


async def test_the_service_shows_the_outbox(postgres_url: str, tmp_path: Path) -> None:
    async with (
        service(postgres_url, tmp_path, notify_url=postgres_url) as it,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as sql,
    ):
        await it.until("active")
        await it.pg.outbox.install()
        async with it.pg.outbox.consume("search") as events:
            await it.pg.outbox.publish(sql, "orders", "1")
            assert await payloads(events, 1) == ["1"]
            await it.pg.outbox.status()
            text = (await it.client.get("/metrics")).text
            assert 'moored_outbox_consumer_lag_seconds{consumer="search",schema="moored"}' in text
            status = (await it.client.get("/v1/status")).text
            assert '"outbox":{"schema":"moored"' in status.replace(" ", "")


async def test_the_configured_broker_names_the_publisher_that_holds_delivery_back(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_outbox, "WATCH_EVERY", 0.02)
    monkeypatch.setattr(_outbox, "HELD_TOO_LONG", 0.01)
    keys = tmp_path / "keys"
    keys.write_text("")
    broker: dict[str, Any] = {"broker_channels": ("orders",), "broker_keys": keys}
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as sql:
        await sql.execute(ddl(wake="poll").encode())
        async with service(postgres_url, tmp_path, **broker) as it:
            view = it.service.view
            await until(lambda: view.parts()["broker"] == "active", "the broker works", LIMIT)
            async with publishing(postgres_url) as culprit:
                await it.pg.outbox.publish(sql, "orders", "waits")
                await until(lambda: view.parts()["broker"] == "degraded", "it is told", LIMIT)
                (why,) = view.reasons("broker")
                assert f"transaction of backend {culprit.info.backend_pid} in database" in why
