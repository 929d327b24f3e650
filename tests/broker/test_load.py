"""Many streams over real HTTP, some frozen and some slow: the others lose nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.broker.serving import ACME, KEYS, served

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource
from moored.testing import scaled

#: The bytes and the number of events, which fill the buffers of a frozen client's socket.
LARGE, EVENTS = "x" * 2_000, 200
#: The most that the process may grow by for each stream: both ends, and their buffers.
KIB_PER_STREAM = 300


class Counting(asyncio.Protocol):
    """A client that counts the events, and reads slowly or never if need be."""

    def __init__(self, goal: int) -> None:
        self._goal = goal
        self.seen = 0
        self.done = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        for line in data.split(b"\n")[:-1]:
            if line.startswith(b'data: {"org_id"'):
                number = int(line.partition(b'"number": ')[2].partition(b",")[0])
                assert number == self.seen, f"{number} after {self.seen}"
                self.seen += 1
        self._rest = data[data.rfind(b"\n") + 1 :]
        if self.seen == self._goal and not self.done.done():
            self.done.set_result(None)


def careless(host: str, port: int, request: bytes) -> socket.socket:
    """Open a stream whose client reads only when the test does."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect((host, port))
    line.sendall(request)
    line.setblocking(False)
    return line


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - other tasks change it
        await asyncio.sleep(0.001)


def resident() -> int:
    """Return the KiB of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


async def test_frozen_and_slow_clients_harm_no_other() -> None:
    count = scaled(2000, least=60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (needed := 2 * count + 1000):  # both ends of each connection are in this process
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    source = MemorySource()
    broker = Broker(source, channels=["orders"], max_streams_per_tenant=5000)
    loop = asyncio.get_running_loop()
    async with (
        broker,
        served(BrokerApp(broker, ApiKeys(KEYS))) as url,
        AsyncExitStack() as stack,
        asyncio.timeout(240),
    ):
        host, _, port = urlsplit(url).netloc.partition(":")
        request = f"GET /v1/subscribe HTTP/1.1\r\nHost: {host}\r\nX-API-Key: acme-key\r\n\r\n"
        before = resident()
        lines = [
            stack.enter_context(careless(host, int(port), request.encode())) for _ in range(20)
        ]
        clients = []
        for _ in range(count):
            transport, client = await loop.create_connection(
                lambda: Counting(EVENTS), host, int(port)
            )
            stack.callback(transport.abort)
            transport.write(request.encode())
            clients.append(client)
        await until(lambda: broker.statistics().subscribers == count + 20)
        for number in range(EVENTS):
            body = {"org_id": ACME, "number": number, "text": LARGE}
            source.publish("orders", json.dumps(body))
            # As fast as the clients that read; ten of the others read a little.
            await until(lambda: min(each.seen for each in clients) > number - 20)  # noqa: B023
            for line in lines[:10]:
                with suppress(BlockingIOError):
                    line.recv(100)
        await asyncio.gather(*(client.done for client in clients))
        found = broker.statistics()
        assert [client.seen for client in clients] == [EVENTS] * count
        assert found.dropped["slow"] == 20, "the frozen and the slow clients were disconnected"
        assert found.buffer_high_water <= 64
        assert resident() - before < KIB_PER_STREAM * (count + 20) + 20_000
