"""The shop is stopped while some browsers are frozen, and started again; then they wake up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import free_port
from tests.soaking import some_of
from tests.stories.support import (
    UVICORN,
    Replica,
    all_copied,
    all_seen,
    attached,
    migrate,
    replica,
    tenants,
)

from moored.testing import scaled

ROUNDS = scaled(5, least=1)
READERS, SLEEPERS = scaled(100, least=4), scaled(40, least=3)
SERVERS = {
    "uvicorn": UVICORN,
    "moored serve": ("moored.cli", "serve", "tests.stories.shop:app"),
}
#: Three times the seconds within which a server stops: the machine may be busy.
STOP = 15.0
#: Some orders like this fill all buffers between the shop and a client that does not read.
NOTE = "x" * 900_000
WEBSOCKET = """GET /v1/subscribe HTTP/1.1\r
Host: 127.0.0.1\r
Authorization: Bearer {}\r
Connection: Upgrade\r
Upgrade: websocket\r
Sec-WebSocket-Version: 13\r
Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r
\r
"""


async def frozen_websocket(shop: Replica, tenant: str) -> asyncio.StreamWriter:
    """Open a WebSocket from which no more is read than its first line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", shop.port, limit=1024)
    writer.write(WEBSOCKET.format(tenant).encode())
    assert b" 101 " in await reader.readline()
    return writer


@pytest.mark.parametrize("server", some_of(SERVERS, "uvicorn"))
async def test_frozen_clients_at_sigterm(
    postgres_url: str, tmp_path: Path, figures: Callable[[str], None], server: str
) -> None:
    await migrate(postgres_url)
    port, numbers, [reader, sleeper] = free_port(), itertools.count(1), tenants(2)
    stopped, seen = list[float](), 0
    async with (
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as conn,
        AsyncExitStack() as stack,
    ):
        await conn.execute("alter table orders add column note text")

        async def order(org: str, note: str = "") -> None:
            await conn.execute("insert into orders values (%s, %s, %s)", [next(numbers), org, note])

        async def start() -> Replica:
            shop = await stack.enter_async_context(
                replica(postgres_url, tmp_path, port, command=SERVERS[server])
            )
            await shop.ready()
            return shop

        async def known(shop: Replica) -> dict[str, Any]:
            answer = await shop.answers("/v1/status")
            assert answer is not None
            return dict(answer.json()["broker"])

        async def stall(shop: Replica) -> None:
            """Order, one after the other, until the frozen clients have stalled their streams."""
            while (now := await known(shop))["dropped"].get("slow", 0) <= SLEEPERS:
                await order(sleeper, NOTE)
                while (await known(shop))["events"] == now["events"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        shop = await start()
        async with attached(shop.url, *[reader] * READERS, *[sleeper] * SLEEPERS) as browsers:
            for _ in range(ROUNDS):
                for each in browsers[READERS:]:
                    each.awake.clear()
                with closing(await frozen_websocket(shop, sleeper)):
                    await stall(shop)
                    stopping = asyncio.create_task(shop.ended())
                    while not stopping.done():
                        await order(reader)
                        await asyncio.sleep(0.02)
                    stopped.append(await stopping)
                    assert stopped[-1] < STOP, shop.lines
                await order(sleeper)
                log = "\n".join(shop.lines)
                assert "Traceback" not in log, log
                shop = await start()
                for each in browsers[READERS:]:
                    each.awake.set()
                seen = await all_seen(postgres_url, browsers)
            orders, twice = await all_copied(postgres_url)
            refused = sum((each.refused for each in browsers), start=type(browsers[0].refused)())
        await shop.ended()
    figures(
        f"{server}, {ROUNDS} times: {SLEEPERS} frozen and {READERS} reading browsers, stopped in "
        f"{max(stopped):.1f} s at most; {seen} events, 0 missed, 0 doubled; {orders} orders, "
        f"copied twice {twice}; refused {dict(refused)}"
    )
