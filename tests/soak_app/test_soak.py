"""A whole service under load and faults: nothing is lost, nothing leaks, every error is handled."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
import psutil
import psycopg
import pytest
from tests.http_client import http_client
from tests.programs import Program
from tests.rpc.servers import EchoServer
from tests.servers import free_port
from tests.service.support import Running, clean_environment

from moored.broker import StreamReset
from moored.broker.client import ReceivedEvent, follow
from moored.embedded import SyncEmbeddedPostgres
from moored.testing import base_seed, scaled
from moored.testing.demo import DemoServer

#: Seconds within which the service recovers on a busy machine.
LIMIT = 120.0
#: Seconds of load, and faults meanwhile; the memory is judged in the second half of a long run.
LOAD, FAULTS = scaled(600, least=15), scaled(20, least=4)
LONG = 300
MAX_GROWTH = 1.0  # MB per minute
SUBSCRIBERS, SESSIONS, WRITERS = scaled(500, least=10), scaled(200, least=10), scaled(20, least=2)
#: Tasks and descriptors that may be more than before: the sizes of pools differ by a few.
TOLERANCE = 10 + SUBSCRIBERS // 25
TENANTS = [str(UUID(int=number)) for number in range(1, 1 + max(5, SUBSCRIBERS // 10))]


@dataclass
class Subscriber:
    """A client of the broker that sometimes leaves, and then continues where it was."""

    url: str
    tenant: str
    client: httpx.AsyncClient
    seen: set[int] = field(default_factory=set)
    resets: list[str] = field(default_factory=list)
    #: The id of the last event; before the first one, a client cannot continue where it was.
    after: str = ""
    _task: asyncio.Task[None] | None = None

    def join(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def leave(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _follow(self) -> None:
        stream = follow(self.url, token=self.tenant, after=self.after, client=self.client)
        async for event in stream:
            if isinstance(event, StreamReset):
                self.resets.append(event.reason)
                continue
            assert isinstance(event, ReceivedEvent)
            self.after = event.id or self.after
            self.seen.add(json.loads(event.data)["new"]["id"])


class SoakedService:
    """The service in a process of its own, and the servers that it needs."""

    def __init__(self, postgres: SyncEmbeddedPostgres, folder: Path) -> None:
        self.postgres, self.echo, self.chat = postgres, EchoServer(), DemoServer()
        self.folder = folder
        self.base = f"http://127.0.0.1:{free_port()}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """Start it, wait until it is ready, and stop it."""
        await asyncio.to_thread(self.echo.start)
        async with self.chat:
            given = {
                "url": self.postgres.url,
                "folder": str(self.folder),
                "port": int(self.base.rpartition(":")[2]),
                "grpc": self.echo.port,
                "chat": (await self.chat.serve()).port,
                "tenants": TENANTS,
                "writers": WRITERS,
                "sessions": SESSIONS,
            }
            program = Program(
                *("tests.soak_app.soak_program", json.dumps(given)),
                stderr=True,
                environ=clean_environment(),
            )
            with program:
                self.program = Running(program)
                try:
                    async with http_client(self.base) as client:
                        yield client
                    assert await asyncio.to_thread(self.program.stop, signal.SIGTERM) == 0
                finally:
                    program.kill()
                    self.program.wait()
                    self.echo.kill()

    def start_load(self, seconds: float) -> None:
        """Let writers and senders begin, and end after so many seconds."""
        new = self.folder / "new"
        new.write_text(str(time.time() + seconds))
        new.rename(self.folder / "until")

    # -- faults ------------------------------------------------------------------------------

    async def end_connections(self) -> None:
        """Terminate all connections of PostgreSQL."""
        async with await psycopg.AsyncConnection.connect(self.postgres.url) as conn:
            await conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where pid <> pg_backend_pid() and backend_type in ('client backend', 'walsender')"
            )

    async def restart_postgres(self) -> None:
        """Kill PostgreSQL, and start it again."""
        await asyncio.to_thread(self.postgres.kill)
        await asyncio.to_thread(self.postgres.start)

    async def restart_grpc(self) -> None:
        """Kill the gRPC server, and start it again."""
        await asyncio.to_thread(self.echo.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(self.echo.start)

    async def cut_sessions(self) -> None:
        """Abort the links of all sessions."""
        self.chat.cut()


async def status_when(
    asking: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the first status that satisfies a condition."""
    deadline, status = time.monotonic() + LIMIT, None
    while time.monotonic() < deadline:
        await asyncio.sleep(0.25)
        try:
            status = cast(dict[str, Any], (await asking.get("/v1/status")).json())
            if condition(status):
                return status
        except (httpx.TransportError, KeyError):
            continue  # it is starting
    raise AssertionError(json.dumps(status)[:5000])


def at_rest(status: dict[str, Any]) -> bool:
    """Whether everything is connected."""
    now = status["status"], status["broker"]["subscribers"], status["probe"]["online"]
    return now == ("active", SUBSCRIBERS, SESSIONS)


async def soak(
    service: SoakedService, subscribers: list[Subscriber], chance: random.Random
) -> list[tuple[float, float]]:
    """Break something every now and then while the load runs; return times and the memory in MB."""
    faults = deque(
        [
            service.end_connections,
            service.restart_postgres,
            service.restart_grpc,
            service.cut_sessions,
        ]
    )
    process, memory = psutil.Process(service.program.process.pid), list[tuple[float, float]]()
    service.start_load(LOAD)
    # One in the first half of each part of the load: in the other half everything recovers.
    part, began = LOAD / FAULTS, time.monotonic()
    due = deque(began + part * (turn + chance.uniform(0, 0.5)) for turn in range(FAULTS))
    while (now := time.monotonic()) < began + LOAD or due:
        memory.append((now, process.memory_info().rss / 1e6))
        if due and now > due[0]:
            due.popleft()
            await faults[0]()
            faults.rotate(-1)
        for subscriber in chance.sample(subscribers, max(1, len(subscribers) // 25)):
            if subscriber.after:
                await subscriber.leave()
                subscriber.join()
        await asyncio.sleep(1.0)
    return memory


def growth(memory: list[tuple[float, float]]) -> float:
    """Return the slope of the memory in the second half of the load, in MB per minute."""
    half = (memory[0][0] + memory[-1][0]) / 2
    times, sizes = zip(*[sample for sample in memory if sample[0] >= half], strict=True)
    return 60 * statistics.linear_regression(times, sizes).slope


@pytest.mark.timeout(LOAD + 4 * LIMIT)
async def test_a_service_under_load_and_faults_loses_and_leaks_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with SyncEmbeddedPostgres(tmp_path / "data") as postgres:
        service = SoakedService(postgres, tmp_path)
        async with service.running() as asking:
            subscribers = [
                Subscriber(f"{service.base}/v1/subscribe", TENANTS[number % len(TENANTS)], asking)
                for number in range(SUBSCRIBERS)
            ]
            await status_when(asking, lambda status: status["status"] == "active")
            for subscriber in subscribers:
                subscriber.join()
            before = (await status_when(asking, at_rest))["probe"]
            memory = await soak(service, subscribers, random.Random(base_seed()))
            after = (await status_when(asking, at_rest_again))["probe"]
            # Every committed order has reached the consumer and each subscriber of its tenant.
            orders = await all_delivered(service, subscribers)
            used = psutil.Process(service.program.process.pid).cpu_times()
            record_property("cpu", round(used.user + used.system, 1))
            for subscriber in subscribers:
                await subscriber.leave()
        record_property("orders", orders)
        record_property("results", after["results"])
        record_property("memory", [round(mb) for _, mb in memory[:: max(1, len(memory) // 20)]])
        record_property("growth", growth(memory) if len(memory) > 4 else None)
        record_property("recorder", after["recorder"])
        for name in ("tasks", "descriptors"):
            record_property(name, (before[name], after[name]))
            assert after[name] <= before[name] + TOLERANCE, (name, before, after)
        assert after["unhandled"] == []
        assert defects("\n".join(service.program.lines)) == []
        assert [each.resets for each in subscribers if each.resets] == []
        results = after["results"]
        outcomes = ("Acked", "Rejected", "NotSent", "Unknown")
        assert results["sends"] == sum(results.get(each, 0) for each in outcomes)
        acked = set((tmp_path / "acked").read_text().split())
        assert len(acked) == results["Acked"]
        assert acked <= {each.id for each in service.chat.received}
        if LOAD >= LONG:
            assert growth(memory) < MAX_GROWTH


def defects(log: str) -> list[str]:
    """Return the errors in tracebacks: a lost connection has none."""
    assert "never retrieved" not in log, log
    return re.findall(r"^[\w.]+(?:Error|Exception|Timeout|Closed|Shutdown)\b.*", log, re.MULTILINE)


def at_rest_again(status: dict[str, Any]) -> bool:
    """Whether the load has ended, and everything is connected again."""
    parts = {each["name"]: each for each in status["tree"]["children"]}
    ended = all("finished" in json.dumps(parts[name]) for name in ("writers", "senders"))
    return ended and at_rest(status)


async def all_delivered(service: SoakedService, subscribers: list[Subscriber]) -> int:
    """Wait until every committed order has arrived everywhere; return their number."""
    async with await psycopg.AsyncConnection.connect(service.postgres.url) as conn:
        rows = await (await conn.execute("select id, org from orders")).fetchall()
    wanted = {tenant: {number for number, org in rows if org == tenant} for tenant in TENANTS}
    deadline = time.monotonic() + LIMIT
    while True:
        async with await psycopg.AsyncConnection.connect(service.postgres.url) as conn:
            lost = await (await conn.execute("table orders except table copies")).fetchall()
        missing = [sorted(wanted[each.tenant] - each.seen) for each in subscribers]
        if not lost and not any(missing):
            return len(rows)
        assert time.monotonic() < deadline, f"{lost[:5]}, {[*filter(None, missing)][:5]}"
        await asyncio.sleep(0.5)
