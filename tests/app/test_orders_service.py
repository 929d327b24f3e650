"""`examples/orders_service.py`, a FastAPI app with all parts, in a process of its own."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from tests.service.support import clean_environment, drop_slots

from moored.broker.client import ReceivedEvent, follow
from moored.testing import base_seed, scaled

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
#: Seconds within which a start, a stop or an event happens on a busy machine.
LIMIT = 120.0


class OrdersService:
    """The example, served by uvicorn on one port, from start to start."""

    def __init__(self, url: str, state: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self._environment = {**clean_environment(), "DATABASE_URL": url, "STATE_DIR": str(state)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; `ready()` waits until it answers."""
        command = ["-m", "uvicorn", "orders_service:api", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--log-level", "error"],
            cwd=EXAMPLES,
            env=self._environment,
        )

    async def ready(self, asking: httpx.AsyncClient) -> None:
        """Wait until every part is active."""
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                health = (await asking.get("/moored/v1/health")).json()
            except httpx.TransportError:
                health = {}
            if health.get("status") == "active":
                return
            assert time.monotonic() < deadline, health
            await asyncio.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(LIMIT)


@pytest.fixture
def orders(postgres_url: str, tmp_path: Path) -> Iterator[OrdersService]:
    service = OrdersService(postgres_url, tmp_path)
    try:
        yield service
    finally:
        if service.process is not None:
            service.process.kill()
            service.process.wait()
        drop_slots(postgres_url)


@asynccontextmanager
async def running(service: OrdersService) -> AsyncIterator[httpx.AsyncClient]:
    service.start()
    async with httpx.AsyncClient(base_url=service.base, timeout=LIMIT) as asking:
        await service.ready(asking)
        yield asking


async def until_indexed(asking: httpx.AsyncClient, wanted: set[int]) -> None:
    async with asyncio.timeout(LIMIT):
        while not wanted <= set((await asking.get("/indexed")).json()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_every_part_is_shown_and_requests_in_flight_survive_a_stop(
    orders: OrdersService,
) -> None:
    async with running(orders) as asking:
        stream = f"{orders.base}/moored/v1/subscribe"
        async with aclosing(follow(stream, token="key-of-acme")) as events:
            first = asyncio.ensure_future(anext(events))
            status = {"broker": {"subscribers": 0}}
            while not status["broker"]["subscribers"]:
                await asyncio.sleep(0.05)
                status = (await asking.get("/moored/v1/status")).json()
            assert (await asking.post("/orders/1", params={"item": "tea"})).json() == {"id": 1}
            async with asyncio.timeout(LIMIT):
                assert isinstance(await first, ReceivedEvent)
        await until_indexed(asking, {1})
        names = {"db", "postgres", "schema", "broker", "consumer-search", "stock"}
        assert status["parts"].keys() == names
        metrics = (await asking.get("/moored/metrics")).text
        for name in names:
            assert f'moored_health{{health="active",part="{name}"}} 1.0' in metrics
            explained = await asking.get(f"/moored/v1/explain/{name}")
            assert explained.status_code == 200, explained.text
        assert "<title>moored</title>" in (await asking.get("/moored/")).text
        # Requests that have begun when the service is stopped are answered.
        in_flight = [
            asyncio.create_task(asking.post(f"/orders/{number}", params={"item": "jam"}))
            for number in range(2, 7)
        ]
        working = "select count(*) from pg_stat_activity where query like 'select pg_sleep%'"
        with psycopg.connect(orders._environment["DATABASE_URL"], autocommit=True) as conn:
            row = None
            while row != (5,):
                row = conn.execute(working).fetchone()
                await asyncio.sleep(0)
        stopped = asyncio.create_task(asyncio.to_thread(orders.stop))
        answers = await asyncio.gather(*in_flight)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert await stopped == -signal.SIGTERM  # uvicorn's own way to end


async def test_a_killed_service_starts_healthy_and_loses_no_transaction(
    orders: OrdersService,
) -> None:
    chance = random.Random(base_seed())
    written: set[int] = set()
    with psycopg.connect(orders._environment["DATABASE_URL"], autocommit=True) as conn:
        for life in range(scaled(20, least=2)):
            async with running(orders) as asking:
                for number in range(life * 10, life * 10 + chance.randint(1, 10)):
                    conn.execute("insert into orders values (%s, null, 'x')", (number,))
                    written.add(number)
                await asyncio.sleep(chance.uniform(0, 0.3))
                assert orders.stop(signal.SIGKILL) == -signal.SIGKILL
        async with running(orders) as asking:
            # Every transaction was delivered to this life, or acknowledged in an earlier one.
            conn.execute("insert into orders values (100000, null, 'last')")
            await until_indexed(asking, {100000})
            consumers = (await asking.get("/moored/v1/status")).json()["postgres"]["consumers"]
            assert consumers["search"]["outstanding"] == 0
