"""A real HTTP server for the broker, and clients that read server-sent events, or do not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from tests.http_client import http_client

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource

ACME = "11111111-1111-1111-1111-111111111111"
OTHER = "22222222-2222-2222-2222-222222222222"
KEYS = {"acme-key": ACME, "other-key": OTHER}


@asynccontextmanager
async def served(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Serve an app on a port of the loopback interface, a free one by default; yield its URL."""
    line = socket.create_server(("127.0.0.1", port), backlog=1024)
    # Connections inherit it: a client that does not read is noticed after a few events.
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    # Without uvicorn's own configuration of logging, which would stay for later tests.
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve(sockets=[line]))
    try:
        yield f"http://127.0.0.1:{line.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        line.close()  # uvicorn leaves it open if it had not started yet


class Sse(NamedTuple):
    """One server-sent event as a client gets it."""

    event: str
    data: str
    id: str | None

    def json(self) -> Any:
        return json.loads(self.data)


class Reading:
    """An open stream of server-sent events."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.comments: list[str] = []
        self.retry: int | None = None
        self.start: str | None = None

    async def next(self) -> Sse | None:
        """Return the next event after the start; None at the end of the stream."""
        event, last = "message", None
        data: list[str] = []
        async for line in self._lines:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if line == "" and event == "start":
                self.start = last
                event, last, data = "message", None, []
            elif line == "" and data:
                return Sse(event, "\n".join(data), last)
            elif field == "" and line:
                self.comments.append(value)
            elif field == "event":
                event = value
            elif field == "data":
                data.append(value)
            elif field == "id":
                last = value
            elif field == "retry":
                self.retry = int(value)
        return None

    async def until_comment(self) -> None:
        """Read until a comment has arrived."""
        async for line in self._lines:
            if line.startswith(":"):
                self.comments.append(line[1:])
                return


@asynccontextmanager
async def reading(url: str, key: str | None = "acme-key", **options: Any) -> AsyncIterator[Reading]:
    """Open a stream; the request must succeed."""
    headers = {**options.pop("headers", {})}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with (
        http_client() as client,
        client.stream("GET", f"{url}/v1/subscribe", headers=headers, **options) as response,
    ):
        assert response.status_code == 200, await response.aread()
        yield Reading(response)


class Stage:
    """A broker with a source in memory, served over HTTP."""

    def __init__(self, source: MemorySource, broker: Broker, url: str) -> None:
        self.source = source
        self.broker = broker
        self.url = url

    def publish(self, number: int, tenant: str = ACME, channel: str = "orders") -> None:
        self.source.publish(channel, json.dumps({"org_id": tenant, "number": number}))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - another task changes it
                await asyncio.sleep(0.01)

    async def subscribers(self, number: int) -> None:
        """Wait until so many streams are open."""
        await self.until(lambda: self.broker.statistics().subscribers == number)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with http_client() as client:
            return await client.get(self.url + path, headers=names)


@asynccontextmanager
async def stage(
    authenticate: Any = None,
    *,
    prefix: str = "",
    wrapped: bool = False,
    app: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    source = MemorySource()
    async with Broker(source, channels=["orders", "refunds"], **options) as broker:
        asgi: Any = BrokerApp(broker, authenticate or ApiKeys(KEYS), **(app or {}))
        if prefix:
            asgi = Starlette(routes=[Mount(prefix, asgi)])
        if wrapped:
            asgi = with_own_receive(asgi)
        async with served(asgi) as url:
            yield Stage(source, broker, url + prefix)


def with_own_receive(app: Any) -> Any:
    """Wrap an app as a middleware does that reads the requests."""

    async def wrapping(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, lambda: receive(), send)

    return wrapping


def frozen(url: str, key: str = "acme-key") -> socket.socket:
    """Open a stream whose client never reads."""
    at = urlsplit(url)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect((at.hostname, at.port))
    line.sendall(
        f"GET /v1/subscribe HTTP/1.1\r\nHost: {at.netloc}\r\nX-API-Key: {key}\r\n\r\n".encode()
    )
    return line
