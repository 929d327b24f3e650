"""What the stories share: replicas of the shop, browsers that read its events, and callers."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import httpx
import psycopg
from tests.http_client import http_client
from tests.programs import Program
from tests.servers import free_port
from tests.service.support import Running, clean_environment

from moored.postgres import Outbox

__all__ = ["LIMIT", "UVICORN", "Browser", "Callers", "Replica", "attached", "migrate"]
__all__ += ["all_copied", "all_seen", "replica", "tenants", "until"]

#: Seconds after which something hangs, also on a busy machine.
LIMIT = 90.0
#: How the shop is started.
UVICORN = ("uvicorn", "tests.stories.shop:api")
SCHEMA = """
create table orders (id int primary key, org uuid not null);
create table copies (id int primary key, times int not null);
create table resets (reason text)
"""


def tenants(number: int) -> list[str]:
    """Return the ids of tenants, which are their tokens too."""
    return [str(UUID(int=each)) for each in range(1, number + 1)]


async def migrate(url: str) -> None:
    """Create the tables and the outbox of the shop."""
    async with await psycopg.AsyncConnection.connect(url) as conn:
        await conn.execute(SCHEMA)
    async with Outbox(url, install=True) as outbox:
        await outbox.capture("orders", tenant_column="org")


async def until(condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Poll for an effect that cannot be awaited."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        await asyncio.sleep(0.03)


class Replica(Running):
    """One process of the shop."""

    def __init__(self, process: Program, port: int) -> None:
        super().__init__(process)
        self.port = port

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answers(self, path: str) -> httpx.Response | None:
        """Return its answer, or None if it gives none."""
        try:
            return await asyncio.to_thread(self.get, path, timeout=10)
        except httpx.TransportError:
            return None

    async def ready(self, limit: float = LIMIT) -> float:
        """Wait until a load balancer would use it; return the seconds."""
        began = time.monotonic()
        while (answer := await self.answers("/v1/health?ready")) is None or answer.is_error:
            assert self.process.returncode is None, self.lines
            assert time.monotonic() < began + limit, (answer and answer.text, self.lines)
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def ended(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal, and return the seconds until the process has ended."""
        began = time.monotonic()
        await asyncio.to_thread(self.stop, number)
        return time.monotonic() - began


@asynccontextmanager
async def replica(
    url: str, folder: Path, port: int = 0, *, command: Sequence[str] = UVICORN, **environ: str
) -> AsyncIterator[Replica]:
    """Start the shop as its owner does, and kill what is left of it at the end."""
    port = port or free_port()
    program = Program(
        *(*command, "--port", str(port), "--log-level", "warning"),
        stderr=True,
        environ=clean_environment(
            DATABASE_URL=url, STATE_DIR=str(folder), MOORED_NO_TOKEN="1", **environ
        ),
    )
    with program:
        shop = Replica(program, port)
        try:
            yield shop
        finally:
            program.kill()
            await asyncio.to_thread(shop.wait)


class Browser:
    """A page that shows the orders of its tenant, and reconnects after its last event."""

    def __init__(self, http: httpx.AsyncClient, url: str, tenant: str) -> None:
        self.http, self.url, self.tenant = http, f"{url}/v1/subscribe", tenant
        self.seen: list[int] = []
        self.at: dict[int, float] = {}
        self.resets: list[str] = []
        self.refused = Counter[int]()
        self.after, self.connects = "", 0
        self.attached = asyncio.Event()
        #: Unset while the browser is frozen: it keeps its connection, and does not read.
        self.awake = asyncio.Event()
        self.awake.set()

    def __repr__(self) -> str:
        known = f"{len(self.seen)} events, {self.connects} connects, at {self.after}"
        return f"<Browser {known}, refused {self.refused}, resets {self.resets}>"

    async def run(self) -> None:
        """Read until it is cancelled."""
        while True:
            headers = {"Authorization": f"Bearer {self.tenant}"}
            headers |= {"Last-Event-ID": self.after} if self.after else {}
            try:
                async with self.http.stream("GET", self.url, headers=headers) as answer:
                    if answer.status_code == 200:
                        self.connects += 1
                        await self._read(answer)
                    else:
                        self.refused[answer.status_code] += 1
            except httpx.TransportError:
                pass  # as a browser, it connects again
            self.attached.clear()
            await asyncio.sleep(0.3)

    async def _read(self, answer: httpx.Response) -> None:
        event: dict[str, str] = {}
        async for line in answer.aiter_lines():
            await self.awake.wait()
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
                continue
            self.after = event.get("id", self.after)
            self.attached.set()
            if event.get("event") == "orders":
                number = json.loads(event["data"])["new"]["id"]
                self.seen.append(number)
                self.at[number] = time.monotonic()
            elif event.get("event") == "reset":
                self.resets.append(event["data"])
            event = {}


@asynccontextmanager
async def attached(url: str, *whose: str) -> AsyncIterator[list[Browser]]:
    """Open a browser for each tenant, and wait until all have their first event, `start`."""
    async with http_client() as http, asyncio.TaskGroup() as tasks:
        browsers = [Browser(http, url, tenant) for tenant in whose]
        running = [tasks.create_task(browser.run()) for browser in browsers]
        for each in browsers:
            await until(lambda: bool(each.connects or each.refused), "an answer")  # noqa: B023
            assert not each.refused, each
            await asyncio.wait_for(each.attached.wait(), LIMIT)
        yield browsers
        for task in running:
            task.cancel()


#: The numbers of orders, for all callers of a story.
_numbers = itertools.count(1)


class Callers:
    """Callers who order, each one request after the other, until the block ends."""

    def __init__(self, url: str, whose: list[str], number: int = 2, pause: float = 0.04) -> None:
        self.answers = Counter[int | str]()
        self.slowest, self.first = 0.0, next(_numbers)
        #: When each order was requested.
        self.began: dict[int, float] = {}
        self._url, self._whose, self._number, self._pause = url, whose, number, pause
        self._in_hand = set[int]()
        self._ends = False

    async def __aenter__(self) -> Callers:
        self._tasks = [asyncio.create_task(self._call()) for _ in range(self._number)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ends = True
        await asyncio.gather(*self._tasks)

    async def answered(self) -> None:
        """Wait until the present requests are answered."""
        present = {*self._in_hand}
        await until(lambda: not present & self._in_hand, "answers")

    async def succeed(self, number: int) -> None:
        """Wait until so many more requests have succeeded: long, on a busy machine."""
        wanted = self.answers[200] + number
        while (now := self.answers[200]) < wanted:
            await until(lambda: self.answers[200] > now, "a request")

    async def _call(self) -> None:
        async with http_client() as http:
            while not self._ends:
                number = next(_numbers)
                org = self._whose[number % len(self._whose)]
                began = self.began[number] = time.monotonic()
                self._in_hand.add(number)
                try:
                    path = f"{self._url}/orders/{number}"
                    answer = await http.post(path, params={"org": org})
                    self.answers[answer.status_code] += 1
                except httpx.TransportError as error:
                    self.answers[repr(error)] += 1
                self._in_hand.remove(number)
                self.slowest = max(self.slowest, time.monotonic() - began)
                await asyncio.sleep(self._pause)


async def all_seen(url: str, browsers: Iterable[Browser], since: int = 0) -> int:
    """Wait until all have each order of their tenant, none twice; return how many they have."""
    browsers = list(browsers)
    orders: dict[str, set[int]] = {each.tenant: set() for each in browsers}
    async with await psycopg.AsyncConnection.connect(url) as conn:
        query = "select id, org::text from orders where id >= %s and org::text = any(%s)"
        for number, org in await (await conn.execute(query, [since, [*orders]])).fetchall():
            orders[org].add(number)
    wanted = {id(each): orders[each.tenant] for each in browsers}
    deadline = time.monotonic() + LIMIT
    while missing := [each for each in browsers if wanted[id(each)] - {*each.seen}]:
        assert time.monotonic() < deadline, (missing, [len(each) for each in wanted.values()])
        assert not any(each.resets for each in browsers), browsers
        await asyncio.sleep(0.03)
    for each in browsers:
        doubled = [number for number, times in Counter(each.seen).items() if times > 1]
        assert (doubled, each.resets) == ([], []), each.tenant
        assert {*each.seen} <= wanted[id(each)]
    return sum(len(each.seen) for each in browsers)


async def all_copied(url: str, limit: float = LIMIT) -> tuple[int, int]:
    """Wait until the consumer has copied all orders; return how many, and how many twice."""
    deadline = time.monotonic() + limit
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        while True:
            query = "select count(*), count(times), coalesce(sum(greatest(times - 1, 0)), 0) from "
            cursor = await conn.execute(query + "orders full join copies using (id)")
            row = await cursor.fetchone()
            assert row is not None
            if row[0] == row[1]:
                return int(row[0]), int(row[2])
            assert time.monotonic() < deadline, f"{row[1]} of {row[0]} orders were copied"
            await asyncio.sleep(0.05)
