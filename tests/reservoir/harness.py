"""Helpers of the tests with real servers: both kinds of pool behind one interface, callers that run
until they are stopped, and a proxy that records the time of each connect."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import asyncpg
import psycopg
from tests.leases.observer import Grant, Window, excess

from moored.kernel import LoopThread
from moored.reservoir import AsyncConnectionPool, ConnectionPool, ReservoirError, Statistics
from moored.testing.proxy import FaultProxy

__all__ = [
    "DRIVERS",
    "LIMIT",
    "SHELLS",
    "Gate",
    "Load",
    "Rig",
    "Shell",
    "lost",
    "until",
]

#: The two pools with psycopg, and the one for asyncio with asyncpg.
Shell = Literal["asyncio", "threads", "asyncpg"]
SHELLS: tuple[Shell, ...] = ("asyncio", "threads")
DRIVERS: tuple[Shell, ...] = (*SHELLS, "asyncpg")

#: Three times the longest pause of a refiller after failures (5 s, and half as much by chance).
LIMIT = 22.5


async def until(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Poll until a condition holds; fail after the limit."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        await asyncio.sleep(0.01)


class Gate(FaultProxy):
    """A fault proxy that records the time of each connect, in nanoseconds."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.arrivals: list[int] = []

    def _accept_client(self, client: socket.socket) -> None:
        self.arrivals.append(time.monotonic_ns())
        super()._accept_client(client)

    def url(self, server: str, *, login: str | None = None, **options: str) -> str:
        """The URL of a server through this proxy, with another login if one is given."""
        parts = urlsplit(server)
        login = parts.netloc.rpartition("@")[0] if login is None else login
        query = urlencode(options, quote_via=quote)
        return urlunsplit(parts._replace(netloc=f"{login}@{self.host}:{self.port}", query=query))

    async def cut(self) -> None:
        """Reset every connection, and wait until they are closed."""
        self.reset()
        await until(lambda: self.statistics().open == 0, "all are reset")

    def excess(self, *, rate: float, burst: int) -> Window | None:
        """The window with more arrivals than rate x window + burst, if there is one."""
        return excess([Grant(at, 1) for at in self.arrivals], rate=rate, burst=burst)


class Rig:
    """A pool of either kind, driven from a test under asyncio.

    What blocks runs in threads: as many as there are callers, so that none waits for another's.
    """

    def __init__(self, shell: Shell, conninfo: Any, **settings: Any) -> None:
        self.shell = shell
        if shell == "asyncpg":
            settings["connect"] = asyncpg.connect
        else:
            settings.setdefault("kwargs", {"autocommit": True})
        self.pool: AsyncConnectionPool[Any] | ConnectionPool[Any]
        kind = ConnectionPool if shell == "threads" else AsyncConnectionPool
        self.pool = kind(conninfo, open=False, **settings)
        self._threads = ThreadPoolExecutor(256, thread_name_prefix="caller")

    async def __aenter__(self) -> Self:
        await self._do(self.pool.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._do(self.pool.close)
        self._threads.shutdown()

    async def _do(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.shell != "threads":
            return await call(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    # -- use -----------------------------------------------------------------------------------

    async def ask(self, query: str = "select 1", timeout: float | None = None) -> Any:
        """Check out a connection, run a query, and return its only value."""
        if isinstance(self.pool, AsyncConnectionPool):
            async with self.pool.connection(timeout) as conn:
                return await self.execute(conn, query)
        return await self._do(self._ask, query, timeout)

    def _ask(self, query: str, timeout: float | None) -> Any:
        assert isinstance(self.pool, ConnectionPool)
        with self.pool.connection(timeout) as conn:
            return _only(conn.execute(query).fetchone())

    async def take(self, timeout: float | None = None) -> Any:
        """Check out a connection, to be returned with `give`."""
        return await self._do(self.pool.getconn, timeout)

    async def give(self, *connections: Any) -> None:
        """Return a connection of `take`."""
        for conn in connections:
            await self._do(self.pool.putconn, conn)

    async def execute(self, conn: Any, query: str) -> Any:
        """Run a query on a connection of `take`, and return its only value."""
        if self.shell == "asyncpg":
            return await conn.fetchval(query)
        cursor = await self._do(conn.execute, query)
        return _only(await self._do(cursor.fetchone))

    def backend(self, conn: Any) -> int:
        """The process id of a connection's backend."""
        pid = conn.get_server_pid() if self.shell == "asyncpg" else conn.info.backend_pid
        return int(pid)

    async def drain(self) -> None:
        """Replace all connections."""
        await self._do(self.pool.drain)

    async def resize(self, size: int) -> None:
        """Resize the pool."""
        await self._do(self.pool.resize, size, size)

    async def restart_refiller(self) -> None:
        """Crash the refiller, and wait until its supervisor has restarted it."""
        supervisor = self.pool.reservoir.upkeep._supervisor
        assert supervisor is not None
        if self.shell != "threads":
            await supervisor.restart_child("refiller")
        else:
            await self._do(LoopThread.shared().run, supervisor.restart_child("refiller"))

    # -- what there is -------------------------------------------------------------------------

    @property
    def now(self) -> Statistics:
        """The statistics of the pool."""
        return self.pool.statistics()

    @property
    def live(self) -> int:
        """How many connections are ready or in use."""
        return self.now.size + self.now.in_use

    async def full(self, births: int = 0) -> None:
        """Wait until the pool is full, and this many connections were opened in total."""
        await until(
            lambda: self.live == self.now.target and self.now.refills >= births,
            f"full, with {births} births",
        )

    async def born(self, number: int, limit: float = LIMIT) -> None:
        """Wait until this many connections were opened in total."""
        await until(lambda: self.now.refills >= number, f"{number} births", limit)

    async def waiting(self, number: int) -> None:
        """Wait until this many callers wait."""
        await until(lambda: self.now.waiting == number, f"{number} callers wait")


class Load:
    """Callers that check out a connection, run a query and return it, until they are stopped."""

    def __init__(
        self,
        rig: Rig,
        callers: int,
        *,
        hold: float = 0.02,
        think: float = 0.03,
        timeout: float | None = LIMIT,
    ) -> None:
        self._rig = rig
        self._callers = callers
        self._hold = hold
        self._think = think
        self._timeout = timeout
        self._over = threading.Event()
        self._work: list[asyncio.Future[None]] = []
        #: When each call was served, and what went wrong.
        self.served: list[float] = []
        self.errors: list[Exception] = []
        #: The longest that a caller waited for its connection.
        self.slowest = 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for _ in range(self._callers):
            if self._rig.shell != "threads":
                self._work.append(loop.create_task(self._call()))
            else:
                self._work.append(loop.run_in_executor(self._rig._threads, self._call_in_thread))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._work)

    async def served_more(self, number: int) -> None:
        """Wait until this many more calls were served."""
        wanted = len(self.served) + number
        await until(lambda: len(self.served) >= wanted, f"{number} more calls are served")

    def per_second(self) -> list[int]:
        """The calls served in each whole second, without the first and the last second."""
        counts = Counter(int(at - self.served[0]) for at in sorted(self.served))
        return [counts[second] for second in range(1, max(counts))]

    async def _call(self) -> None:
        pool = self._rig.pool
        assert isinstance(pool, AsyncConnectionPool)
        while not self._over.is_set():
            began = time.monotonic()
            try:
                async with pool.connection(self._timeout) as conn:
                    self._got(began)
                    await conn.execute("select 1")
                    await asyncio.sleep(self._hold)
            except Exception as error:
                self.errors.append(error)
            else:
                self.served.append(time.monotonic())
            await asyncio.sleep(self._think)

    def _call_in_thread(self) -> None:
        pool = self._rig.pool
        assert isinstance(pool, ConnectionPool)
        while not self._over.is_set():
            began = time.monotonic()
            try:
                with pool.connection(self._timeout) as conn:
                    self._got(began)
                    conn.execute("select 1")
                    time.sleep(self._hold)
            except Exception as error:
                self.errors.append(error)
            else:
                self.served.append(time.monotonic())
            time.sleep(self._think)

    def _got(self, began: float) -> None:
        self.slowest = max(self.slowest, time.monotonic() - began)


def lost(error: BaseException | None) -> bool:
    """Whether an error is a driver's error for a lost connection, and not one of the pool."""
    psycopgs = (psycopg.OperationalError,)
    # The last one is how asyncpg puts it between the server's farewell and the end of the stream.
    asyncpgs = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, asyncpg.InternalClientError)
    return isinstance(error, psycopgs + asyncpgs) and not isinstance(error, ReservoirError)


def _only(row: Sequence[Any] | None) -> Any:
    assert row is not None
    return row[0]
