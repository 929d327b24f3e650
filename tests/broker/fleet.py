"""Nodes that are restarted, and clients that roam between them, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple

from tests.broker.serving import ACME, KEYS, OTHER, served
from tests.servers import free_port

from moored.broker import ApiKeys, Broker, BrokerApp

#: Opens the broker of a node.
MakeNode = Callable[[], AbstractAsyncContextManager[Broker]]
WRITERS = 8
CLIENTS = 6


class Sent(NamedTuple):
    """An event of a writer."""

    writer: int
    number: int

    @property
    def tenant(self) -> str:
        return (ACME, OTHER)[self.writer % 2]

    @property
    def body(self) -> dict[str, object]:
        return {"org_id": self.tenant, **self._asdict()}


class Roamer:
    """A client that leaves again and again, and comes back at any node."""

    def __init__(self, key: str, ports: list[int], goal: int) -> None:
        self._key = key
        self._ports = ports
        self._goal = goal
        self._last = ""
        self.got: list[Sent] = []
        self.connections = 0
        self.begun = asyncio.Event()

    async def run(self) -> None:
        while len(self.got) < self._goal:
            # At most 12 of the 40 events, or more, of a client: it connects at least four times.
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._read(random.choice(self._ports), len(self.got) + random.randint(1, 12))
            await asyncio.sleep(0.01)

    async def _read(self, port: int, until: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            last = f"Last-Event-ID: {self._last}\r\n" if self._last else ""
            # HTTP/1.0, so that the body has no chunks.
            request = f"GET /v1/subscribe HTTP/1.0\r\nX-API-Key: {self._key}\r\n{last}\r\n"
            writer.write(request.encode())
            if b" 200 " in await reader.readuntil(b"\r\n\r\n"):
                self.connections += 1
                while len(self.got) < min(until, self._goal):
                    self._handle((await reader.readuntil(b"\n\n")).decode())
        finally:
            writer.close()

    def _handle(self, block: str) -> None:
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        event = fields.get("event")
        assert event in (None, "start", "orders"), block
        self._last = fields.get("id", self._last)
        if event == "orders":
            found = json.loads(fields["data"])
            self.got.append(Sent(found["writer"], found["number"]))
        self.begun.set()


async def serve(make: MakeNode, port: int, ends: list[asyncio.Event]) -> None:
    """Serve a node on a port, until the first of these events (drained), until the next, and so on.

    It is not cancelled: uvicorn would leave its sockets open if that came while it stops.
    """
    for number, due in enumerate(ends):
        async with make() as broker, served(BrokerApp(broker, ApiKeys(KEYS)), port):
            await due.wait()
            if number == 0:
                await broker.drain(over=0.1)


async def roam(
    make: MakeNode,
    write: Callable[[int, int], Awaitable[None]],
    count: int,
    *more_at: Callable[[], Awaitable[None]],
) -> None:
    """Let clients roam between two nodes that are restarted twice; check that all is well.

    :param write: publishes `count` events of a writer.
    :param more_at: called when a third, and when two thirds of the events have arrived.
    """
    ports = [free_port(), free_port()]
    goal = count * WRITERS // 2
    clients = [Roamer([*KEYS][number % 2], ports, goal) for number in range(CLIENTS)]
    ends = [[asyncio.Event(), asyncio.Event(), asyncio.Event()] for _ in ports]
    nodes = zip(ports, ends, strict=True)
    serving = [asyncio.ensure_future(serve(make, port, due)) for port, due in nodes]

    async def disturb() -> None:
        for third in (0, 1):
            while sum(len(each.got) for each in clients) < goal * CLIENTS * (third + 1) // 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for each in ends:
                each[third].set()
            for call in more_at:
                await call()

    try:
        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run())
            for client in clients:
                await client.begun.wait()
            group.create_task(disturb())
            for writer in range(WRITERS):
                group.create_task(write(writer, count))  # type: ignore[arg-type]
    finally:
        for due in itertools.chain(*ends):
            due.set()
        await asyncio.gather(*serving)
    check(clients, count)


def check(clients: list[Roamer], count: int) -> None:
    """Every client got all events of its tenant, once, in the same order, and reconnected."""
    for number, client in enumerate(clients):
        got = client.got
        assert len(got) == len(set(got)), "an event came twice"
        for writer in range(number % 2, WRITERS, 2):
            found = [each.number for each in got if each.writer == writer]
            assert found == [*range(count)], "an event is missing, or the order is not kept"
        assert got == clients[number % 2].got, "the order differs between clients"
        assert client.connections > 2
