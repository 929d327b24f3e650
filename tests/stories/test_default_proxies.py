"""PgBouncer and nginx as they are installed: the service works, also when each is restarted."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from tests.stories.proxies import nginx, pgbouncer
from tests.stories.support import (
    Callers,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
    until,
)

from moored.testing import scaled

#: Requests before, between and after the restarts.
REQUESTS = scaled(1_000, least=40)


async def test_pgbouncer_and_nginx_with_their_defaults(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    whose, numbers = tenants(3), itertools.count(-1, -1)
    async with (
        pgbouncer(tmp_path / "pgbouncer", postgres_url) as pooler,
        replica(pooler.url, tmp_path, DIRECT_URL=postgres_url, MOORED_ALLOWED_HOSTS="shop") as shop,
        nginx(tmp_path / "nginx", shop.port) as front,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
    ):

        async def order() -> int:
            number = next(numbers)
            await conn.execute("insert into orders values (%s, %s)", [number, whose[0]])
            return number

        async def used() -> Callers:
            async with Callers(front.url, whose) as callers:
                await callers.succeed(REQUESTS)
            assert callers.answers.keys() == {200}
            await all_seen(postgres_url, browsers, since=-100)
            return callers

        async def arrive_at_once() -> float:
            """Order; each event comes at once, and not only when a buffer of nginx is full."""
            began = time.monotonic()
            for _ in range(10):
                number = await order()
                await until(lambda: number in browsers[0].at, "the event", 30)  # noqa: B023
            return (time.monotonic() - began) / 10

        ready = await shop.ready()
        async with attached(front.url, *whose) as browsers:
            await used()
            took = [await arrive_at_once()]
            # Without PgBouncer no request is answered, but events are read from the server.
            await pooler.stop(signal.SIGKILL)
            took.append(await arrive_at_once())
            assert [each.connects for each in browsers] == [1] * 3
            await pooler.start()
            again = await shop.ready()
            await used()
            # Without nginx no browser has a stream; afterwards each gets what it missed.
            await front.stop()
            for _ in range(10):
                await order()
            await front.start()
            await used()
            seen = await all_seen(postgres_url, browsers, since=-100)
            orders, twice = await all_copied(postgres_url)
        ended = await shop.ended()
    assert orders == seen
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"ready after {ready:.1f} s; {orders} orders, 0 requests failed; {seen} events, 0 missed, "
        f"0 doubled; an event takes {1e3 * took[0]:.0f} ms, and without PgBouncer "
        f"{1e3 * took[1]:.0f}; ready {again:.1f} s after its return; copied twice {twice}; "
        f"stopped in {ended:.1f} s"
    )
