"""Replicas behind nginx are replaced one by one, while callers order and browsers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.soaking import some_of
from tests.stories.proxies import nginx
from tests.stories.support import (
    Callers,
    Replica,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
)

from moored.testing import scaled

#: The same number for any number of replicas: each of them needs half a minute.
REPLACED = scaled(12, least=2)
BROWSERS = scaled(200, least=8)
#: Requests between two replacements.
REQUESTS = scaled(200, least=30)


@pytest.mark.parametrize("replicas", some_of([1, 2, 3], 2))
async def test_rolling_deploys(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None], replicas: int
) -> None:
    await migrate(postgres_url)
    whose = tenants(4)
    async with AsyncExitStack() as stack:

        async def start() -> Replica:
            shop = await stack.enter_async_context(
                replica(postgres_url, tmp_path, MOORED_ALLOWED_HOSTS="shop")
            )
            took.append(await shop.ready())
            return shop

        took, stopped = list[float](), list[float]()
        shops = deque([await start() for _ in range(replicas)])
        front = await stack.enter_async_context(
            nginx(tmp_path / "nginx", *(each.port for each in shops))
        )
        async with attached(front.url, *(whose * (BROWSERS // 4))) as browsers:
            async with Callers(front.url, whose) as callers:
                for _ in range(REPLACED):
                    await callers.succeed(REQUESTS)
                    shops.append(await start())
                    old = shops.popleft()
                    await front.reload(*(each.port for each in shops))
                    await callers.answered()  # the old workers of nginx ask the old replicas
                    stopped.append(await old.ended())
                    log = "\n".join(old.lines)
                    assert "Traceback" not in log, log
                await callers.succeed(REQUESTS)
            seen = await all_seen(postgres_url, browsers)
            orders, twice = await all_copied(postgres_url)
            refused = sum((each.refused for each in browsers), start=type(browsers[0].refused)())
            connects = sum(each.connects for each in browsers)
        for shop in shops:
            await shop.ended()
    assert callers.answers.keys() == {200}
    assert not refused
    figures(
        f"{replicas} replicas, {len(stopped)} replaced: ready after {max(took[replicas:]):.1f} s, "
        f"stopped in {max(stopped):.1f} s at most; {orders} requests, 0 failed, the slowest "
        f"{callers.slowest * 1e3:.0f} ms; {seen} events in {len(browsers)} browsers, {connects} "
        f"connections, 0 missed, 0 doubled; copied twice {twice}"
    )
