"""How soon after the start of its process does each of two replicas serve?

Both have one database and the default stream id, so that one of them has the lock of the stream and
the other stands by. A replica serves when it is ready for a load balancer, and has sent a live
event that was published after its stream was opened. Both are started at the same moment, and then
the one that stands by is replaced, as in a rolling deploy.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psycopg

from _harness import Report, main, spread
from moored.embedded import EmbeddedPostgres
from moored.postgres.outbox import Outbox

LIMIT = 60.0
TENANT = "acme"
COMMAND = [sys.executable, "-m", "moored.cli", "serve", "_replica_side:app", "--port"]
#: Seconds between two events, and between two questions whether a replica is ready.
OFTEN = 0.02


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


class Replica:
    """A process of the service, and when it was started."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.address = f"http://127.0.0.1:{port}"
        self.began = time.perf_counter()

    async def serves(self) -> float:
        """Wait until it serves; return the milliseconds since its start."""
        async with httpx.AsyncClient(base_url=self.address, timeout=LIMIT, trust_env=False) as http:
            async with asyncio.timeout(LIMIT):
                while not await self._ready(http):  # noqa: ASYNC110
                    await asyncio.sleep(OFTEN)
                headers = {"Authorization": f"Bearer {TENANT}"}
                async with http.stream("GET", "/v1/subscribe", headers=headers) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line == "event: orders":
                            return (time.perf_counter() - self.began) * 1000
        raise AssertionError("the stream has ended")

    async def _ready(self, http: httpx.AsyncClient) -> bool:
        if self.process.returncode is not None:
            raise SystemExit("a replica has ended")
        try:
            return (await http.get("/v1/health?ready")).is_success
        except httpx.TransportError:
            return False

    async def waits(self) -> bool:
        """Whether the other replica has the lock of the stream."""
        async with httpx.AsyncClient(base_url=self.address, timeout=LIMIT, trust_env=False) as http:
            return (await http.get("/v1/health")).status_code == 202

    async def end(self) -> None:
        """Stop it, as a deploy does."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()


async def start(url: str, state: Path) -> Replica:
    """Start a replica."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        str(port),
        env={**os.environ, "URL": url, "STATE": str(state)},
        cwd=Path(__file__).parent,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return Replica(process, port)


@asynccontextmanager
async def publishing(url: str) -> AsyncIterator[None]:
    """Publish events all the time."""

    async def publish() -> None:
        async with (
            Outbox(url) as outbox,
            await psycopg.AsyncConnection.connect(url, autocommit=True) as conn,
        ):
            while True:
                await outbox.publish(conn, "orders", {}, tenant=TENANT)
                await asyncio.sleep(OFTEN)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def measured(report: Report, rounds: int) -> None:
    holder, standby, replaced = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as state:
        async with EmbeddedPostgres() as server:
            async with await psycopg.AsyncConnection.connect(server.url) as conn:
                await conn.execute("create table orders (id int primary key)")
            async with Outbox(server.url, install=True), publishing(server.url):
                for number in range(rounds):
                    async with AsyncExitStack() as stack:

                        async def begin(name: str) -> Replica:
                            one = await start(server.url, Path(state, name))
                            stack.push_async_callback(one.end)
                            return one

                        two = [await begin(f"{number}-{which}") for which in "ab"]
                        took = await asyncio.gather(*(each.serves() for each in two))
                        waits = [await each.waits() for each in two]
                        if sorted(waits) != [False, True]:
                            raise AssertionError("one of the replicas stands by, not both or none")
                        holder.append(took[waits.index(False)])
                        standby.append(took[waits.index(True)])
                        await two[waits.index(True)].end()
                        replaced.append(await (await begin(f"{number}-c")).serves())
    report.add("holder_serving_ms", spread(holder, "ms"))
    report.add("standby_serving_ms", spread(standby, "ms"))
    report.add("replaced_serving_ms", spread(replaced, "ms"))


def measure(report: Report, quick: bool) -> None:
    asyncio.run(measured(report, 3 if quick else 10))
    report.notes.append("from the start of the process to a live event of its stream")


if __name__ == "__main__":
    main("replicas", (__doc__ or "").partition("\n")[0], measure)
