"""Events of the broker in a real browser, over a server that is killed and started again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from tests.broker import live_program
from tests.broker.serving import ACME, KEYS, OTHER, served
from tests.browser.chromium import Page
from tests.leases.redis_server import RedisServer
from tests.programs import Program
from tests.servers import free_port, require_server

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

#: What both clients have received: the shipped one, and the browser's own EventSource.
LISTS = ("ol", "ul")


@contextmanager
def running(port: int, url: str) -> Iterator[None]:
    """Run the program, and kill it at the end."""
    with Program(live_program.__name__, str(port), url) as program:
        try:
            until_it_answers(f"http://127.0.0.1:{port}/")
            yield
        finally:
            program.kill()


def received(by: str) -> str:
    return f"[...document.querySelectorAll('{by} li')].map(item => item.textContent).join()"


def until_it_answers(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(url, verify=False, timeout=60).raise_for_status()
        except httpx.TransportError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)
        else:
            return


async def test_idle_event_source_resumes_after_the_id_of_the_last_keepalive(page: Page) -> None:
    """A block with an id and without data is no event, and yet sets the id to resume after."""
    source, ids = MemorySource(), list[str]()

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/subscribe":
            ids.append(dict(scope["headers"]).get(b"last-event-id", b"").decode())
        await app(scope, receive, send)

    async def script(request: Request) -> HTMLResponse:
        text = "document.cookie = 'session=acme-key'; new EventSource('/v1/subscribe')"
        return HTMLResponse(f"<!doctype html><title>idle</title><script>{text}</script>")

    async with Broker(source, channels=["orders"]) as broker, asyncio.timeout(60):
        streams = BrokerApp(broker, ApiKeys(KEYS), cookie="session", retry=(0.1, 0.1))
        app = Starlette(routes=[Route("/", script), Mount("/", streams)])
        async with served(recorded) as url:
            await asyncio.to_thread(page.open, url)
            while not broker.statistics().subscribers:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.01)
            source.publish("orders", json.dumps({"org_id": OTHER}))
            while not broker.statistics().events:  # noqa: ASYNC110 - nor for this
                await asyncio.sleep(0.01)
            async with broker.subscribe(ACME) as newest:
                expected = newest.start
            await broker.drain(over=0)
            while len(ids) < 2:  # noqa: ASYNC110 - nor for this
                await asyncio.sleep(0.01)
    assert ids[:2] == ["", expected]


def test_browser_loses_nothing_over_a_restart_and_shows_a_reset(page: Page) -> None:
    port = free_port()

    def publish(number: int) -> None:
        payload = json.dumps({"org_id": ACME, "number": number})
        fields = {"channel": "orders", "tenant": ACME, "payload": payload}
        client.xadd("moored:events", fields)

    def until(condition: str) -> None:
        for by in LISTS:
            page.until(received(by) + condition)

    with (
        RedisServer(require_server("redis")) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        with running(port, server.url):
            page.open(f"http://127.0.0.1:{port}/")
            # Nothing is known of a stream before its first event: publish until one arrives.
            deadline = time.monotonic() + 60
            while any(page.evaluate(received(by)) == "" for by in LISTS):
                publish(0)
                assert time.monotonic() < deadline, "no event has arrived"
                time.sleep(0.05)
            publish(1)
            until(".endsWith('1')")
        publish(2)  # while no server runs
        publish(3)
        with running(port, server.url):
            until(".endsWith('1,2,3')")
            publish(4)
            until(".endsWith('1,2,3,4')")
        client.delete("moored:events")
        publish(5)
        with running(port, server.url):
            until(".includes('1,2,3,4,reset')")
            publish(6)
            until(".endsWith('reset,6')")
