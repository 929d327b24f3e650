"""Scripted servers, connections, lease stores and token providers, for tests without real ones."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.leases.virtual import ScriptedStore, client

from moored.leases import Leases, Request, Taken
from moored.reservoir import AsyncConnectionPool, Reservoir, ReservoirConfig
from moored.reservoir._core import Core, Waiter
from moored.reservoir._item import Item

__all__ = [
    "Conn",
    "Journal",
    "Server",
    "SqlError",
    "Tokens",
    "caller",
    "filled",
    "open_one",
    "pool_of",
    "reservoir",
    "wait_until",
]


class SqlError(Exception):
    """An error of a driver, with a message and a SQLSTATE."""

    def __init__(self, sqlstate: str | None, text: str = "the server said no") -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


class Conn:
    """A connection without a server."""

    _numbers = itertools.count(1)

    def __init__(self, server: Server | None = None, password: str | None = None) -> None:
        self.number = next(self._numbers)
        self.password = password
        self.closed = False
        self._server = server

    async def close(self) -> None:
        if self._server is not None and not self.closed:
            self._server.journal.append("close")
            self._server.alive -= 1
        self.closed = True

    def __repr__(self) -> str:
        return f"<Conn {self.number}>"


class Server:
    """Accepts or refuses connects as a test sets it; `connect` is the driver's function."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal: list[str] = [] if journal is None else journal.lines
        #: Seconds that a connect takes; before that, what the next ones take, one each.
        self.takes = 0.01
        self.take: deque[float] = deque()
        #: What the next connects raise, one each; then what all of them raise.
        self.script: deque[BaseException | None] = deque()
        self.error: BaseException | None = None
        #: When each connect began, and with which password.
        self.times: list[float] = []
        self.passwords: list[str | None] = []
        #: Connects in progress now and at most; open connections.
        self.under_way = 0
        self.most_under_way = 0
        self.alive = 0
        self.most_alive = 0

    async def connect(self, password: str | None = None) -> Conn:
        self.journal.append("connect")
        self.times.append(asyncio.get_running_loop().time())
        self.passwords.append(password)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.take.popleft() if self.take else self.takes)
        finally:
            self.under_way -= 1
        error = self.script.popleft() if self.script else self.error
        if error is not None:
            raise error
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return Conn(self, password)


class Journal(ScriptedStore):
    """A lease store that records its calls in the same journal as the server."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        #: How often each lease was given back.
        self.released: list[str] = []
        self.acquired: list[str] = []

    async def acquire(self, request: Request) -> Any:
        self.lines.append("lease")
        grant = await super().acquire(request)
        if grant is not None:
            self.acquired.append(request.id)
        return grant

    async def release(self, requests: Any) -> Any:
        self.lines.extend("release" for _ in requests)
        self.released += [request.id for request in requests]
        return await super().release(requests)

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        self.lines.append("rate")
        return await super().take(key, rate=rate, burst=burst, tokens=tokens)

    @asynccontextmanager
    async def leases(self, **policy: Any) -> AsyncIterator[Leases]:
        async with client(self, **policy) as leases:
            yield leases


class Tokens:
    """Returns tokens as a test sets it, and records that in the journal."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.value = "token-1"
        self.error: Exception | None = None
        self.takes = 0.0
        self.rejected: list[str] = []

    async def get(self) -> str:
        self.lines.append("token")
        await asyncio.sleep(self.takes)
        if self.error is not None:
            raise self.error
        return self.value

    def reject(self, value: str) -> None:
        self.rejected.append(value)


def reservoir(server: Server, config: ReservoirConfig | None = None, **more: Any) -> Reservoir[Any]:
    """A reservoir of scripted connections, without a staggered start."""
    config = config or ReservoirConfig(max_size=1)
    if config.start_stagger is None:
        config = config.but(start_stagger=0.0)
    return Reservoir("", config=config, connect=server.connect, endpoint="db", name="r", **more)


def pool_of(server: Server | None = None, **more: Any) -> AsyncConnectionPool[Conn]:
    """A pool of scripted connections, with settings of its reservoir and parameters of a pool."""
    names = {field.name for field in dataclasses.fields(ReservoirConfig)}
    settings = {name: more.pop(name) for name in names & more.keys()}
    config = ReservoirConfig(**{"max_size": 1, "start_stagger": 0.0, **settings})
    connect = (server or Server()).connect
    pool: AsyncConnectionPool[Conn] = AsyncConnectionPool(
        "", connect=connect, config=config, endpoint="db", **more
    )
    return pool


async def wait_until(true: Callable[[], object], timeout: float = 60.0) -> None:
    """Let virtual time pass until a condition holds."""
    step = 0.001
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(step)
            step = min(1.1 * step, 0.05)


# -- for the core ------------------------------------------------------------------------------


def open_one(
    core: Core[Conn], now: float = 0.0, *, life: float = 660.0
) -> tuple[Item[Conn], Waiter[Conn] | None]:
    """Plan one connection, and let it arrive."""
    guard = core.config.guard_window
    item: Item[Conn] = Item(Conn(), born=now, lifetime=life, guard=guard)
    return item, core.arrived(item, now)


def filled(
    number: int, now: float = 0.0, *, core: Core[Conn] | None = None, **settings: Any
) -> tuple[Core[Conn], list[Item[Conn]]]:
    """A core with this many ready connections."""
    core = core or Core(ReservoirConfig(**{"max_size": number, **settings}))
    items: list[Item[Conn]] = []
    while len(items) < number:
        planned = core.plan()
        assert planned
        for _ in range(planned):
            if len(items) < number:
                items.append(open_one(core, now)[0])
            else:
                core.failed()
    return core, items


def caller(core: Core[Conn], now: float, *, patience: float = 30.0) -> Waiter[Conn]:
    """Add a waiter to the queue."""
    waiter: Waiter[Conn] = Waiter(now, now + patience)
    core.enqueue(waiter)
    return waiter
