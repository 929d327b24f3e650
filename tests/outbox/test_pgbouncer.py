"""Everything but the listener goes through PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import require_server

from moored.postgres import Listener, Outbox

from .reading import LIMIT, payloads


async def test_publishers_and_consumers_go_through_a_pooler(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pgbouncer(require_server("pgbouncer"), url, pool_size=2) as pooled:

        async def publish(writer: int) -> None:
            async with await psycopg.AsyncConnection.connect(
                pooled, prepare_threshold=None
            ) as conn:
                for number in range(20):
                    await outbox.publish(conn, "orders", f"{writer}/{number}")
                    await conn.commit()

        # PgBouncer refuses a connection with options.
        with_options = f"{pooled}?options=-c%20statement_timeout%3D60000"
        async with Listener(url) as listener, Outbox(with_options, listener=listener) as outbox:
            await listener.wait_until_up(LIMIT)
            await outbox.install()
            async with outbox.consume("one") as one, outbox.consume("two") as two:
                found = await asyncio.gather(
                    payloads(one, 80), payloads(two, 80), *(publish(n) for n in range(4))
                )
            assert found[0] == found[1]
            assert len(set(found[0] or ())) == 80
            assert await outbox.upkeep() == (0, 0)
            assert (await outbox.status()).held_back is None
    assert "reached without `options`" in caplog.text
