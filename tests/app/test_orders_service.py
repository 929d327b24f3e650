"""`examples/orders_service.py`, a FastAPI app with all parts, in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import psycopg
import pytest
from tests.app.orders import LIMIT, OrdersService, Prices

from moored.broker.client import ReceivedEvent, follow
from moored.testing import base_seed, scaled

#: The parts that the page shows, each with the kind of card; a finished one has none.
PARTS = {
    "db": "pool",
    "postgres": "manager",
    "prices": "channel",
    "broker": "broker",
    "consumer-search": "run",
    "popular": "run",
}
#: A metric of the pool, the stream with its consumer, the listener, the broker and the channel.
METRICS = (
    r'moored_reservoir_in_use\{pool="db",service=".*"\}',
    r'moored_postgres_consumer_attached\{consumer="search",.*\}',
    r"moored_postgres_listener_up\{.*\}",
    r'moored_links\{name=".*",state="up",system="listener"\}',
    r'moored_broker_subscribers\{broker="broker"\}',
    r'moored_links\{name=".*",state="up/serving",system="rpc"\}',
)
#: What the explanation of each part says.
EXPLAINED = {
    "db": "in use",
    "postgres": r"^active: streaming[\s\S]*\nlistener active: up",
    "prices": "generation 1 is connected",
    "broker": "0 streams|1 stream",
    "consumer-search": "^works",
    "popular": "^works",
}
TEA = {"item": "tea"}


@pytest.fixture
def prices() -> Iterator[Prices]:
    server = Prices()
    yield server
    server.close()


@pytest.fixture
def orders(postgres_url: str, tmp_path: Path, prices: Prices) -> Iterator[OrdersService]:
    service = OrdersService(postgres_url, tmp_path, prices)
    yield service
    service.kill()


async def until_status(asking: httpx.AsyncClient, part: str, **wanted: object) -> None:
    """Wait for numbers of a part in the status."""
    async with asyncio.timeout(LIMIT):
        while True:
            found = (await asking.get("/moored/v1/status")).json()[part]
            if all(found.get(name) == value for name, value in wanted.items()):
                return
            await asyncio.sleep(0.05)


async def drained(asking: httpx.AsyncClient, path: str, opened: asyncio.Event, **more: str) -> None:
    """Read a stream of server-sent events to its end."""
    async with asking.stream("GET", path, headers=more) as answer:
        assert answer.status_code == 200, await answer.aread()
        opened.set()
        async for _ in answer.aiter_bytes():
            pass


async def stopped_with_requests_in_flight(
    orders: OrdersService, asking: httpx.AsyncClient, prices: Prices
) -> None:
    """Stop it while requests wait for another server, and streams are open: no request fails."""
    opened = asyncio.Event()
    streams = [asyncio.create_task(drained(asking, "/moored/v1/events", opened))]
    await asyncio.wait_for(opened.wait(), LIMIT)
    prices.hold()
    in_flight = [
        asyncio.create_task(asking.post(f"/orders/{number}", params={"item": "jam"}))
        for number in range(100, 110)
    ]
    await prices.holds(10)
    stopped = asyncio.create_task(asyncio.to_thread(orders.stop))
    await asyncio.wait_for(asyncio.gather(*streams), LIMIT)  # so the signal has arrived
    prices.release()
    answers = await asyncio.gather(*in_flight)
    assert [answer.status_code for answer in answers] == [200] * 10
    # One process of uvicorn ends by the signal, the parent of several workers with 0.
    assert await stopped in (0, -signal.SIGTERM)
    log = orders.log.read_text()
    assert "Traceback" not in log, log
    assert "ERROR" not in log, log


async def test_every_part_is_shown_and_a_stop_fails_no_request(
    orders: OrdersService, prices: Prices
) -> None:
    async with orders.running("--loop", "asyncio") as asking:
        stream = f"{orders.base}/moored/v1/subscribe"
        async with aclosing(follow(stream, token="key-of-acme")) as events:
            first = asyncio.ensure_future(anext(events))
            await until_status(asking, "broker", subscribers=1)
            made = await asking.post("/orders/1", params=TEA)
            assert made.json() == "tea for 9.90"
            async with asyncio.timeout(LIMIT):
                assert isinstance(await first, ReceivedEvent)
        await until_status(asking, "popular", ordered={"tea": 1})
        await until_status(asking, "consumer-search", transactions=1)
        shown = (await asking.get("/moored/v1/status")).json()
        assert shown["parts"] == dict.fromkeys((*PARTS, "schema"), "active")
        assert {name: shown["kinds"].get(name) for name in PARTS} == PARTS
        assert shown["postgres"]["listener"]["up"]
        assert "ordered" in shown["postgres"]["listener"]["channels"]
        assert 'src="static/page.js"' in (await asking.get("/moored/")).text
        metrics = (await asking.get("/moored/metrics")).text
        for name in (*PARTS, "schema"):
            assert f'moored_health{{health="active",part="{name}"}} 1.0' in metrics
        for pattern in METRICS:
            assert re.search(f"^{pattern} ", metrics, re.MULTILINE), pattern
        for name, text in EXPLAINED.items():
            explained = (await asking.get(f"/moored/v1/explain/{name}")).json()
            assert re.search(text, explained["explanation"]), explained
        await stopped_with_requests_in_flight(orders, asking, prices)


async def test_two_workers_share_the_work_and_a_stop_fails_no_request(
    orders: OrdersService, prices: Prices
) -> None:
    async with orders.running("--loop", "uvloop", "--workers", "2") as asking:
        # One of them streams, the other is its standby.
        await orders.until_health(asking, {"active", "waiting"})
        # Both are ready, so a balancer sends requests to both.
        ready, alone = "/moored/v1/health?ready", {"Connection": "close"}
        codes = [(await asking.get(ready, headers=alone)).status_code for _ in range(10)]
        assert codes == [200] * 10
        await stopped_with_requests_in_flight(orders, asking, prices)


async def test_a_killed_service_starts_healthy_and_loses_no_transaction(
    orders: OrdersService, record_property: Callable[[str, object], None]
) -> None:
    chance, numbers = random.Random(base_seed()), itertools.count(1)
    resets = (
        "create table resets (at timestamptz); "
        "create function reset() returns trigger language plpgsql as "
        "$$begin insert into resets values (now()); return null; end$$; "
        "create trigger reset after truncate on search execute function reset()"
    )
    async with await psycopg.AsyncConnection.connect(orders.url, autocommit=True) as conn:

        async def write_for(seconds: float) -> None:
            until = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until:
                await conn.execute("insert into orders values (%s, null, 'x')", (next(numbers),))
                await asyncio.sleep(0.01)

        async with orders.running():
            await conn.execute(resets)
        for kill in range(scaled(20, least=2)):
            if kill % 2:  # while it starts, or else while it works
                await asyncio.to_thread(orders.stop)
                orders.start()
            await write_for(chance.uniform(0.0, 2.0))
            assert await asyncio.to_thread(orders.stop, signal.SIGKILL) == -signal.SIGKILL
            async with orders.running() as asking, asyncio.timeout(LIMIT):
                lost = "select count(*) from (table orders except table search)"
                while (await (await conn.execute(lost)).fetchone()) != (0,):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                # None of it by a Reset, after which the table would have been copied again.
                await until_status(asking, "consumer-search", resets=0)
        assert await (await conn.execute("select count(*) from resets")).fetchone() == (0,)
        record_property("orders", next(numbers) - 1)
