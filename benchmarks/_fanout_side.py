"""One server of fanout.py, in its own process, chosen by the first argument.

`ours` is a broker, `sse_starlette` what its users write (a queue for each stream), and `raw` an
asyncio server that writes the bytes of each event to every connection. The path of a request names
the tenant. The server prints its port, and then obeys commands on its standard input: `publish N
TENANT` publishes N events one after the other, each as soon as the last was written to all streams,
`clients` prints the number of streams, and `cpu` and `rss` what the process has used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import uvicorn

CHANNEL = "orders"


class Server(Protocol):
    """What the commands need."""

    def publish(self, tenant: str, payload: str) -> None: ...

    def clients(self) -> int: ...


class Ours:
    """The broker, with a source in memory."""

    def __init__(self) -> None:
        from moored.broker import Broker, BrokerApp, Identity, MemorySource

        self.source = MemorySource()
        self.broker = Broker(
            self.source, channels=[CHANNEL], max_streams=100_000, max_streams_per_tenant=100_000
        )
        self.app: Any = BrokerApp(self.broker, Identity)

    def publish(self, tenant: str, payload: str) -> None:
        self.source.publish(CHANNEL, payload)

    def clients(self) -> int:
        return self.broker.statistics().subscribers


class SseStarlette:
    """A queue for each stream, by tenant."""

    def __init__(self) -> None:
        from sse_starlette import EventSourceResponse
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.routing import Route

        self.queues: defaultdict[str, set[asyncio.Queue[Any]]] = defaultdict(set)
        self.number = 0

        async def subscribe(request: Request) -> EventSourceResponse:
            tenant = request.headers["authorization"].partition(" ")[2]
            return EventSourceResponse(self._stream(tenant))

        self.app: Any = Starlette(routes=[Route("/v1/subscribe", subscribe)])

    async def _stream(self, tenant: str) -> AsyncIterator[dict[str, str]]:
        queue: asyncio.Queue[Any] = asyncio.Queue(64)
        self.queues[tenant].add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.queues[tenant].discard(queue)

    def publish(self, tenant: str, payload: str) -> None:
        self.number += 1
        tenant = json.loads(payload)["org_id"]
        event = {"id": str(self.number), "event": CHANNEL, "data": payload}
        for queue in self.queues[tenant]:
            queue.put_nowait(event)

    def clients(self) -> int:
        return sum(map(len, self.queues.values()))


class Raw(asyncio.Protocol):
    """Connections to which every event is written as bytes."""

    lines: ClassVar[defaultdict[str, list[asyncio.Transport]]] = defaultdict(list)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        tenant = data.partition(b"Bearer ")[2].partition(b"\r")[0].decode()
        self._transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
        self.lines[tenant].append(self._transport)

    def publish(self, tenant: str, payload: str) -> None:
        event = f"id: 1\nevent: {CHANNEL}\ndata: {payload}\n\n".encode()
        for line in self.lines[tenant]:
            line.write(event)

    def clients(self) -> int:
        return sum(map(len, self.lines.values()))


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def obey(server: Server, written: Callable[[], Awaitable[None]]) -> None:
    """Read commands until the end of the input."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        answer: float = 0
        if line[0] == "publish":
            payload = json.dumps({"org_id": line[2], "text": "x" * 200, "end": "EVENT"})
            for _ in range(int(line[1])):
                server.publish(line[2], payload)
                await written()
        elif line[0] == "clients":
            answer = server.clients()
        elif line[0] == "cpu":
            answer = time.process_time()
        else:
            answer = resident_bytes()
        print(answer, flush=True)


async def main(side: str) -> None:
    line = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = line.getsockname()[1]
    if side == "raw":
        raw = Raw()
        async with await asyncio.get_running_loop().create_server(Raw, sock=line):
            print(port, flush=True)
            await obey(raw, lambda: asyncio.sleep(0))
        return
    server = Ours() if side == "ours" else SseStarlette()
    config = uvicorn.Config(server.app, lifespan="off", log_level="error", backlog=4096)
    web = uvicorn.Server(config)
    serving = asyncio.ensure_future(web._serve(sockets=[line]))
    if isinstance(server, Ours):
        await server.broker.__aenter__()
    print(port, flush=True)
    await obey(server, lambda: asyncio.sleep(0))
    serving.cancel()


if __name__ == "__main__":
    # Without uvicorn's Runner, so that all sides have the same event loop.
    asyncio.run(main(sys.argv[1]))
