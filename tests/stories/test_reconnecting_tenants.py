"""Clients of 200 quiet tenants reconnect to an outbox of a million rows; others stay live."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from tests.http_client import http_client
from tests.servers import free_port
from tests.stories.support import (
    Browser,
    Callers,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
    until,
)

from moored.testing import scaled

ROWS = scaled(1_000_000, least=10_000)
QUIET, LIVE = scaled(200, least=20), 4
#: How often all quiet clients come back, and how many orders each of their tenants has.
ROUNDS, EACH = scaled(10, least=2), 5
#: Requests without reconnects, and with them.
REQUESTS = scaled(1_000, least=60)
#: Seconds within which a live event arrives on a busy machine.
LATE = 10.0
#: Rows of tenants of which no client is there.
FILL = """
insert into moored.outbox (tenant, channel, payload)
select md5((n %% 50)::text)::uuid::text, 'orders', '{}' from generate_series(1, %s) n
"""
#: An order of each quiet tenant; a caller's orders have other numbers.
ORDER = (
    "insert into orders select -%s - n, org from unnest(%s::uuid[]) with ordinality as t(org, n)"
)


async def leave_behind(url: str, quiet: list[str]) -> None:
    """Store the rows, among which are the few orders of the quiet tenants."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        for turn in range(EACH):
            await conn.execute(FILL, [ROWS // EACH])
            await conn.execute(ORDER, [turn * len(quiet), quiet])


def milliseconds(seconds: list[float], part: int) -> float:
    """Return a percentile."""
    return 1e3 * statistics.quantiles(seconds, n=100)[part - 1]


async def reconnected(browser: Browser) -> float:
    """Connect after the last event; return the seconds until the browser has what it missed."""
    began = time.monotonic()
    reading = asyncio.create_task(browser.run())
    try:
        await until(lambda: len(browser.seen) >= EACH or bool(browser.resets), repr(browser))
        return max(browser.at.values()) - began
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_quiet_tenants_that_reconnect_to_a_large_outbox(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    port, whose, waited = free_port(), tenants(QUIET + LIVE), list[float]()
    quiet, live = whose[LIVE:], whose[:LIVE]
    async with replica(postgres_url, tmp_path, port) as shop:
        await shop.ready()
        async with attached(shop.url, *quiet) as browsers:
            pass
        await shop.ended()
    after = [(each.tenant, each.after) for each in browsers]
    await leave_behind(postgres_url, quiet)
    async with replica(postgres_url, tmp_path, port) as shop, http_client() as http:
        await shop.ready()
        async with attached(shop.url, *live) as readers:
            async with Callers(shop.url, live) as calm:
                await calm.succeed(REQUESTS)
            async with Callers(shop.url, live) as busy:
                for _ in range(ROUNDS):
                    back = [Browser(http, shop.url, tenant) for tenant, _ in after]
                    for browser, (_, last) in zip(back, after, strict=True):
                        browser.after = last
                    waited += await asyncio.gather(*map(reconnected, back))
                    await all_seen(postgres_url, back, since=-EACH * QUIET)
                    assert {each.connects for each in back} == {1}
                await busy.succeed(REQUESTS - busy.answers[200])
            seen = await all_seen(postgres_url, readers)
            assert [each.connects for each in readers] == [1] * LIVE
        await shop.ended()
    assert calm.answers.keys() == busy.answers.keys() == {200}
    at = {number: when for each in readers for number, when in each.at.items()}
    late = [[at[n] - began for n, began in each.began.items()] for each in (calm, busy)]
    assert max(map(max, late)) < LATE
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"{ROWS:,} rows, {len(waited):,} reconnects of {QUIET} tenants, {EACH} events each, "
        f"0 missed, 0 doubled: replay p95 {milliseconds(waited, 95):.0f} ms; {seen} live events, "
        f"0 missed, 0 doubled: p99 {milliseconds(late[1], 99):.0f} ms with them, "
        f"{milliseconds(late[0], 99):.0f} ms without"
    )
