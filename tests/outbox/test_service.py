"""The outbox of the service's database: in its status, its explanation and its metrics."""

from __future__ import annotations

from pathlib import Path

import psycopg
from tests.service.test_database import service

from .reading import payloads


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
