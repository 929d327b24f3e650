"""The Python client: it resumes after its last event, over restarts of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing

import pytest
from tests.broker.serving import ACME, KEYS, served
from tests.servers import free_port

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource, StreamReset, client
from moored.broker.client import ReceivedEvent, StreamRefused, follow


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 100)

    monkeypatch.setattr(client, "sleep", sleep)


async def test_client_gets_every_event_over_restarts_of_the_server() -> None:
    source, got = MemorySource(), list[int]()
    port = free_port()

    async def collect() -> None:
        url = f"http://127.0.0.1:{port}/v1/subscribe"
        async for event in follow(url, token="acme-key", channels=["orders"]):
            assert isinstance(event, ReceivedEvent)
            got.append(json.loads(event.data)["number"])

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - another task changes it
            await asyncio.sleep(0.01)

    async with Broker(source, channels=["orders"]) as broker, asyncio.timeout(60):
        app = BrokerApp(broker, ApiKeys(KEYS))
        collecting = asyncio.create_task(collect())
        for life in range(3):
            async with served(app, port):
                await until(lambda: broker.statistics().subscribers == 1)
                source.publish("orders", json.dumps({"org_id": ACME, "number": 2 * life}))
                await until(lambda: len(got) == 2 * life + 1)  # noqa: B023 - used in this turn
            # While no server runs:
            source.publish("orders", json.dumps({"org_id": ACME, "number": 2 * life + 1}))
        async with served(app, port):
            await until(lambda: len(got) == 6)
        collecting.cancel()
    assert got == [0, 1, 2, 3, 4, 5]


async def test_client_reports_a_reset_and_a_refused_token() -> None:
    broker = Broker(MemorySource(), channels=["orders"])
    async with broker, served(BrokerApp(broker, ApiKeys(KEYS))) as url, asyncio.timeout(30):
        address = f"{url}/v1/subscribe"
        events = follow(address, token=lambda: "acme-key", after="unknown-1")
        async with aclosing(events):
            assert isinstance(await anext(events), StreamReset)
        with pytest.raises(StreamRefused, match="401"):
            await anext(follow(address, token="wrong"))
