"""The Python client: it resumes after its last event, over restarts of the server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from tests.broker.serving import ACME, KEYS, served
from tests.servers import free_port
from tests.stream_server import stream_server

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


async def test_the_http_client_is_made_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, threads = client._new_client, list[threading.Thread]()

    def in_this_thread() -> httpx.AsyncClient:
        threads.append(threading.current_thread())
        return made()

    monkeypatch.setattr(client, "_new_client", in_this_thread)
    broker = Broker(MemorySource(), channels=["orders"])
    async with broker, served(BrokerApp(broker, ApiKeys(KEYS))) as url, asyncio.timeout(30):
        with pytest.raises(StreamRefused):
            await anext(follow(f"{url}/v1/subscribe", token="wrong"))
    assert threads
    assert threading.current_thread() not in threads


async def test_client_reports_a_reset_and_a_refused_token() -> None:
    broker = Broker(MemorySource(), channels=["orders"])
    async with broker, served(BrokerApp(broker, ApiKeys(KEYS))) as url, asyncio.timeout(30):
        address = f"{url}/v1/subscribe"
        events = follow(address, token=lambda: "acme-key", after="unknown-1")
        async with aclosing(events):
            assert isinstance(await anext(events), StreamReset)
        with pytest.raises(StreamRefused, match="401"):
            await anext(follow(address, token="wrong"))


async def received(answer: bytes, **options: Any) -> list[Any]:
    """Return what the client yields of one response, until it connects again."""
    again = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if connections:
            again.set()
        else:
            writer.write(answer)
        connections.append(writer)

    async def collect() -> None:
        async for event in events:
            got.append(event)  # noqa: PERF401 - it is seen while it grows

    connections: list[Any] = []
    got: list[Any] = []
    async with stream_server(respond) as port:
        events = follow(f"http://127.0.0.1:{port}/v1/subscribe", token="x", **options)
        async with asyncio.timeout(30), aclosing(events):
            collecting = asyncio.ensure_future(collect())
            waiting = asyncio.ensure_future(again.wait())
            await asyncio.wait({collecting, waiting}, return_when="FIRST_COMPLETED")
            for task in (collecting, waiting):
                task.cancel()
            await asyncio.wait({collecting, waiting})
            if not collecting.cancelled() and (error := collecting.exception()) is not None:
                raise error
    return got


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"


async def test_client_keeps_the_separators_of_unicode_in_the_data() -> None:
    text = "one\u2028two\x85three\x0bfour"
    answer = OK + f"id: 1\nevent: orders\ndata: {text}\ndata: five\n\n".encode()
    assert await received(answer) == [ReceivedEvent("orders", f"{text}\nfive", "1")]


async def test_client_does_not_yield_what_concerns_only_the_connection() -> None:
    answer = OK + b"retry: 1\n\nid: 5\nevent: start\ndata: {}\n\nevent: expired\ndata: {}\n\n"
    skipped = b'event: skipped\ndata: {"count": 3}\n\n'
    assert await received(answer + skipped) == [ReceivedEvent("skipped", '{"count": 3}', None)]


@pytest.mark.parametrize("status", [b"301 Moved", b"404 Not Found", b"410 Gone"])
async def test_answer_that_another_attempt_does_not_change_is_an_error(status: bytes) -> None:
    with pytest.raises(StreamRefused, match=status.decode()[:3]):
        await received(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("status", [b"429 Slow", b"502 Bad Gateway", b"503 Away"])
async def test_other_answers_are_logged_and_tried_again(
    status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    later = b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n"
    assert await received(b"HTTP/1.1 " + status + b"\r\n" + later) == []
    assert status.decode()[:3] in caplog.text
