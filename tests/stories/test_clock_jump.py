"""The clock of the machine jumps by a day, ahead and back, while the service works."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from tests.stories.support import (
    Callers,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
)

from moored.testing import scaled

#: Requests after each jump.
REQUESTS = scaled(1_000, least=50)


async def test_a_clock_that_jumps_by_a_day(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None]
) -> None:
    await migrate(postgres_url)
    whose = tenants(3)
    async with replica(postgres_url, tmp_path, command=["tests.stories.jumping"]) as shop:
        await shop.ready()
        async with attached(shop.url, *whose) as browsers:
            async with Callers(shop.url, whose) as callers:
                for jump in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2):
                    shop.process.send_signal(jump)
                    await callers.succeed(REQUESTS)
                    await shop.ready(0.5)
            slowest = callers.slowest
            seen = await all_seen(postgres_url, browsers)
            orders, twice = await all_copied(postgres_url)
            connects = [each.connects for each in browsers]
            # A ticket is valid for 30 s, whatever the wall clock does meanwhile.
            headers = {"Authorization": f"Bearer {whose[0]}"}
            answer = await browsers[0].http.post(f"{shop.url}/v1/tickets", headers=headers)
            shop.process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.1)
            path = f"{shop.url}/v1/subscribe?ticket={answer.json()['ticket']}"
            async with browsers[0].http.stream("GET", path) as stream:
                assert stream.status_code == 200
        ended = await shop.ended()
    assert (orders, twice) == (seen, 0)
    assert callers.answers.keys() == {200}
    assert connects == [1] * 3  # no stream was lost
    assert slowest < 10
    log = "\n".join(shop.lines)
    assert "Traceback" not in log, log
    figures(
        f"4 jumps of a day, {orders} requests, 0 failed, the slowest {slowest * 1e3:.0f} ms; "
        f"{seen} events, 0 missed, 0 doubled; no stream was lost; stopped in {ended:.1f} s"
    )
