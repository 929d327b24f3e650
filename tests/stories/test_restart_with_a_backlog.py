"""The service was stopped while orders went on: it becomes ready, and works them off."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
from tests.servers import free_port
from tests.stories.support import all_copied, all_seen, attached, migrate, replica, tenants

from moored.testing import scaled

BACKLOG = scaled(100_000, least=2_000)
#: Orders in one transaction.
EACH = 20


async def test_a_restart_with_a_backlog(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    port, [acme, quiet] = free_port(), tenants(2)
    async with replica(postgres_url, tmp_path, port) as shop:
        await shop.ready()
        async with attached(shop.url, acme, quiet) as browsers:
            answer = await browsers[0].http.post(f"{shop.url}/orders/0?org={acme}")
            assert answer.is_success
            await all_seen(postgres_url, browsers)
            await all_copied(postgres_url)
            stopped = await shop.ended()
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn:
                order = "insert into orders select %s + n, %s from generate_series(1, %s) n"
                for first in range(0, BACKLOG, EACH):
                    await conn.execute(order, [first, acme, EACH])
            began = time.monotonic()
            async with replica(postgres_url, tmp_path, port) as shop:
                ready = await shop.ready()
                memory = psutil.Process(shop.process.pid).memory_info().rss
                answer = await browsers[0].http.post(f"{shop.url}/orders/{BACKLOG + 1}?org={acme}")
                assert answer.is_success
                orders, twice = await all_copied(postgres_url, limit=600)
                seen = await all_seen(postgres_url, browsers)
                took = time.monotonic() - began
                growth = psutil.Process(shop.process.pid).memory_info().rss - memory
                await shop.ready(0.5)
    assert orders == seen == BACKLOG + 2
    assert twice <= EACH  # of the last transaction before the stop, at most
    assert growth < 100e6
    figures(
        f"stopped in {stopped:.1f} s, {BACKLOG:,} orders waited; ready after {ready:.1f} s, "
        f"copied and with the browser after {took:.1f} s; missed 0, copied twice {twice}; "
        f"memory + {growth / 1e6:.0f} MB"
    )
