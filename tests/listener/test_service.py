"""The listener in `moored serve`: a refused pooler, the health of a lost listener, its metrics."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import require_server
from tests.service.support import moored
from tests.service.test_database import service

from .breaks import LIMIT, listener_pids


def test_a_pooler_as_notify_url_ends_the_service(postgres_url: str) -> None:
    with pgbouncer(require_server("pgbouncer"), postgres_url) as pooler:
        ended = moored(
            "serve",
            "--port=0",
            DATABASE_URL=pooler,
            MOORED_REPLICATION_URL=postgres_url,
            NOTIFY_URL=pooler,
        )
    assert ended.returncode == 2
    assert "pooler in transaction mode" in ended.stderr
    assert "NOTIFY_URL" in ended.stderr


async def test_a_lost_listener_is_200_degraded(postgres_url: str, tmp_path: Path) -> None:
    async with service(postgres_url, tmp_path, notify_url=postgres_url) as it:
        await it.until("active")
        assert it.pg.listener is not None
        await it.pg.listener.wait_until_up(LIMIT)
        told: list[str] = []
        it.service.monitor.subscribe(lambda change: told.append(change.status))
        [pid] = await listener_pids(postgres_url)
        os.kill(pid, signal.SIGTERM)
        await it.until("degraded")
        code, body = await it.health()
        assert (code, body["status"]) == (200, told[-1])
        assert told[0] == "degraded"
        await it.until("active")
        text = (await it.client.get("/metrics")).text
        assert f'moored_postgres_listener_up{{listener="{it.pg.listener.name}"}} 1.0' in text
