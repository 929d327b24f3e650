"""What does it cost to send an event to many browsers?

One server process for each side, real HTTP, equal payloads. With one event outstanding, the next
one is published when every client has got the last. The figures are of the server's CPU time; each
delivery is counted at the clients.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from _harness import Figure, Report, main, quartiles, ratios, spread

MARK = b"EVENT"
STREAMS = 1_000
AUDIENCE = 100
TENANTS = 1_000


def tenant(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012d}"


class Client(asyncio.Protocol):
    """A stream that counts events."""

    def __init__(self, clients: Clients, of: str) -> None:
        self._clients = clients
        self._of = of
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        request = (
            f"GET /v1/subscribe HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._of}\r\n\r\n"
        )
        transport.write(request.encode())  # type: ignore[attr-defined]
        self._clients.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if found := data.count(MARK):
            self._clients.count(found)
        self._rest = data[-len(MARK) + 1 :] if not data.endswith(MARK) else b""


class Clients:
    """All streams to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.transports: list[asyncio.BaseTransport] = []
        self.received = 0
        self._expected = 0
        self._all: asyncio.Future[None] | None = None

    async def open(self, number: int, of: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(number):
            await loop.create_connection(lambda: Client(self, of), "127.0.0.1", self._port)

    def expect(self, number: int) -> asyncio.Future[None]:
        """Return a future that is done when so many more events have arrived."""
        self._expected = self.received + number
        self._all = asyncio.get_running_loop().create_future()
        return self._all

    def count(self, found: int) -> None:
        self.received += found
        if self._all is not None and self.received >= self._expected and not self._all.done():
            assert self.received == self._expected, "an event arrived twice"
            self._all.set_result(None)


class Served:
    """A server process, and the streams to it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.clients = Clients(port)

    async def ask(self, command: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        return float(await self._process.stdout.readline())

    async def open(self, number: int, of: str) -> None:
        """Open streams, and wait until the server has all of them."""
        await self.clients.open(number, of)
        while await self.ask("clients") < len(self.clients.transports):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def cpu_us(self, events: int, audience: int, of: str) -> float:
        """Return the CPU microseconds of a delivery, with one event outstanding."""
        before = await self.ask("cpu")
        for _ in range(events):
            done = self.clients.expect(audience)
            await self.ask(f"publish 1 {of}")
            await asyncio.wait_for(done, 60)
        return (await self.ask("cpu") - before) / events / audience * 1e6

    async def burst(self, events: int, audience: int, of: str) -> float:
        """Return the deliveries per second of a burst."""
        begin = time.perf_counter()
        done = self.clients.expect(events * audience)
        await self.ask(f"publish {events} {of}")
        await asyncio.wait_for(done, 60)
        return events * audience / (time.perf_counter() - begin)


@asynccontextmanager
async def served(side: str) -> AsyncIterator[Served]:
    program = str(Path(__file__).with_name("_fanout_side.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, side, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield Served(process, int(await process.stdout.readline()))
    finally:
        process.kill()
        await process.wait()


async def compare(report: Report, rounds: int) -> None:
    """Compare CPU time and memory with sse-starlette's, and CPU time with raw asyncio's."""
    of = tenant(0)
    costs: dict[str, list[float]] = {}
    async with served("ours") as ours, served("sse_starlette") as peer, served("raw") as raw:
        sides = {"ours": ours, "sse_starlette": peer, "raw": raw}
        for name, side in sides.items():
            await side.open(20, of)
            before = await side.ask("rss")
            await side.open(STREAMS - 20, of)
            kib = (await side.ask("rss") - before) / 1024 / (STREAMS - 20)
            report.add(f"{name}_kib_per_connection", Figure(kib, "KiB"))
            await side.cpu_us(3, STREAMS, of)
        for turn in range(rounds):
            for name in [*sides][:: 1 if turn % 2 else -1]:
                costs.setdefault(name, []).append(await sides[name].cpu_us(5, STREAMS, of))
        bursts = {name: [await sides[name].burst(20, STREAMS, of)] for name in ("ours", "raw")}
    versus = ratios(costs["ours"], costs["sse_starlette"])
    report.add("cpu_us_per_delivery_vs_sse_starlette", spread(versus, "times"))
    report.add("cpu_us_per_delivery", spread(costs["ours"], "µs"))
    report.add("burst_deliveries_per_s", Figure(bursts["ours"][0], "/s"))
    report.add("fanout_vs_raw_asyncio", spread(ratios(costs["ours"], costs["raw"]), "times"))


async def many_tenants(report: Report, rounds: int) -> None:
    """Compare an event's cost alone with its cost while 999 other tenants are connected."""
    of = tenant(0)
    async with served("ours") as alone, served("ours") as crowded:
        for side in (alone, crowded):
            await side.open(AUDIENCE, of)
        for number in range(1, TENANTS):
            await crowded.clients.open(1, tenant(number))
        await crowded.open(0, of)
        await asyncio.gather(*(side.cpu_us(20, AUDIENCE, of) for side in (alone, crowded)))
        found = []
        for _ in range(5 * rounds):
            # Short turns in the order A B B A: both sides meet the same noise, and the same drift.
            costs = {alone: 0.0, crowded: 0.0}
            for side in (alone, crowded, crowded, alone):
                costs[side] += await side.cpu_us(10, AUDIENCE, of)
            found.append(costs[crowded] / costs[alone])
    report.add("event_cost_1000_tenants_vs_1", quartiles(found, "times"))


def measure(report: Report, quick: bool) -> None:
    rounds = 4 if quick else 12
    asyncio.run(compare(report, rounds))
    asyncio.run(many_tenants(report, rounds))
    report.notes.append(
        f"{STREAMS} streams, payloads of 290 bytes; raw asyncio writes bytes without HTTP chunks, "
        "authentication, buffers or limits"
    )


if __name__ == "__main__":
    main("fanout", (__doc__ or "").partition("\n")[0], measure)
