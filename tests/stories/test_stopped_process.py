"""The process is stopped for a minute, as that of a laptop that sleeps, and goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from tests.stories.support import all_copied, all_seen, attached, migrate, replica, tenants

from moored.testing import scaled

STOPPED = scaled(60, least=4)
ORDERS = scaled(20_000, least=1_000)


async def test_a_process_that_is_stopped_for_a_minute(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    whose = tenants(3)
    async with replica(postgres_url, tmp_path) as shop:
        await shop.ready()
        async with attached(shop.url, *whose) as browsers:
            path = f"{shop.url}/orders/%d?org={whose[0]}"
            assert (await browsers[0].http.post(path % 0)).is_success
            await all_seen(postgres_url, browsers)
            shop.process.send_signal(signal.SIGSTOP)
            asleep = time.monotonic()
            async with await psycopg.AsyncConnection.connect(postgres_url) as conn:
                for number in range(1, ORDERS + 1):
                    await conn.execute("insert into orders values (%s, %s)", [number, whose[-1]])
            request = asyncio.create_task(browsers[0].http.post(path % (ORDERS + 1)))
            await asyncio.sleep(STOPPED - (time.monotonic() - asleep))
            shop.process.send_signal(signal.SIGCONT)
            began = time.monotonic()
            assert (await request).is_success
            answered = time.monotonic() - began
            await shop.ready()
            seen = await all_seen(postgres_url, browsers)
            orders, twice = await all_copied(postgres_url)
            took = time.monotonic() - began
            ended = await shop.ended()
    assert orders == seen == ORDERS + 2
    assert twice <= 1  # at least once: what was handled and not acknowledged before the sleep
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"stopped for {STOPPED} s, {ORDERS:,} orders meanwhile; a waiting request was answered "
        f"after {answered * 1e3:.0f} ms, everything was there after {took:.1f} s: 0 missed, "
        f"0 doubled in browsers, copied twice {twice}; stopped in {ended:.1f} s"
    )
