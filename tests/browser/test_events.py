"""Events of the broker in a real browser, over a server that is killed and started again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import redis
from tests.broker import live_program
from tests.broker.serving import ACME
from tests.browser.chromium import Page
from tests.leases.redis_server import RedisServer
from tests.programs import Program
from tests.servers import free_port, require_server

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
            httpx.get(url).raise_for_status()
        except httpx.TransportError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)
        else:
            return


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
