"""PgBouncer and nginx as they are installed: the service works, also when each is restarted."""

from __future__ import annotations

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

REQUESTS = scaled(5_000, least=100)


async def test_pgbouncer_and_nginx_with_their_defaults(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    whose = tenants(3)
    async with (
        pgbouncer(tmp_path / "pgbouncer", postgres_url) as pooled,
        replica(pooled, tmp_path, DIRECT_URL=postgres_url, MOORED_ALLOWED_HOSTS="shop") as shop,
        nginx(tmp_path / "nginx", shop.port) as front,
    ):
        ready = await shop.ready()
        async with attached(front.url, *whose) as browsers:
            async with Callers(front.url, whose) as callers:
                await until(lambda: callers.answers[200] > REQUESTS, "requests")
            seen = await all_seen(postgres_url, browsers)
            orders, twice = await all_copied(postgres_url)
            # Each event comes at once: nothing waits for the buffer of nginx to be full.
            async with await psycopg.AsyncConnection.connect(pooled, autocommit=True) as conn:
                for number in range(-10, 0):
                    await conn.execute("insert into orders values (%s, %s)", [number, whose[0]])
                    await until(lambda: number in browsers[0].at, "the event", 10)  # noqa: B023
            assert [each.connects for each in browsers] == [1] * 3
        ended = await shop.ended()
    assert callers.answers.keys() == {200}
    assert (orders, twice) == (seen, 0)
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"ready after {ready:.1f} s; {orders} requests, 0 failed; {seen} events, 0 missed, "
        f"0 doubled, no stream lost; stopped in {ended:.1f} s"
    )
