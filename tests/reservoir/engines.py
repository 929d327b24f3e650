"""Helpers of the tests with SQLAlchemy: engines of all kinds behind one interface, a clock that can
be advanced, and the server's own list of connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from tests.reservoir.harness import until

from moored.kernel import Clock
from moored.reservoir import AsyncConnectionPool, ConnectionPool, ReservoirConfig, Statistics
from moored.reservoir.sqlalchemy import create_async_engine, create_engine, reservoir_of

__all__ = [
    "PID",
    "WAYS",
    "Desk",
    "Held",
    "SteppedClock",
    "Way",
    "backends",
    "left",
    "terminate",
    "unseen",
]

T = TypeVar("T")
#: Threads with psycopg, asyncio with psycopg, asyncio with asyncpg.
Way = Literal["threads", "psycopg", "asyncpg"]
WAYS: tuple[Way, ...] = ("threads", "psycopg", "asyncpg")
PID = "select pg_backend_pid()"

_threads = ThreadPoolExecutor(64, thread_name_prefix="caller")


def unseen(**settings: Any) -> ReservoirConfig:
    """Settings with which the scanner does not run during a test."""
    return ReservoirConfig(**{"lifetime_jitter": 0.0, "scan_every": 3600.0, **settings})


class SteppedClock(Clock):
    """The system's clock, which can be advanced."""

    def __init__(self) -> None:
        self.ahead = 0.0
        super().__init__(lambda: time.monotonic() + self.ahead)


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a thread pool that is not the loop's own."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call, *args)


class Held:
    """A connection of SQLAlchemy in use."""

    def __init__(self, conn: Connection | AsyncConnection) -> None:
        self.conn = conn

    async def ask(self, query: str = PID) -> Any:
        """Run a query and return its only value."""
        if isinstance(self.conn, AsyncConnection):
            return await self.conn.scalar(text(query))
        return await in_thread(self.conn.scalar, text(query))

    async def roll_back(self) -> None:
        """Roll back the transaction."""
        if isinstance(self.conn, AsyncConnection):
            await self.conn.rollback()
        else:
            await in_thread(self.conn.rollback)

    async def close(self) -> None:
        """Return the connection to SQLAlchemy."""
        if isinstance(self.conn, AsyncConnection):
            await self.conn.close()
        else:
            await in_thread(self.conn.close)


class Desk:
    """An engine of any kind, driven from a test under asyncio."""

    def __init__(self, way: Way, url: str, **options: Any) -> None:
        self.engine: Engine | AsyncEngine
        if way == "threads":
            self.engine = create_engine(url, **options)
        else:
            driver = f"postgresql+{way}"
            self.engine = create_async_engine(make_url(url).set(drivername=driver), **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.dispose()

    async def dispose(self) -> None:
        """Dispose of the engine."""
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            await in_thread(self.engine.dispose)

    async def fill(self) -> None:
        """Open all connections, and wait for them."""
        if isinstance(self.pool, AsyncConnectionPool):
            await self.pool.open(wait=True)
        else:
            await in_thread(self.pool.open, True)

    async def take(self) -> Held:
        """Check out a connection, to be closed by the test."""
        if isinstance(self.engine, AsyncEngine):
            return Held(await self.engine.connect())
        return Held(await in_thread(self.engine.connect))

    async def take_all(self, number: int) -> list[Held]:
        """Check out several connections at once."""
        return [await self.take() for _ in range(number)]

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run a function with a connection, in a transaction that is committed."""
        if isinstance(self.engine, AsyncEngine):
            async with self.engine.begin() as conn:
                return await conn.run_sync(work)
        return await in_thread(self._run, self.engine, work)

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        with engine.begin() as conn:
            return work(conn)

    async def ask(self, query: str = PID) -> Any:
        """Check out a connection, run a query, and return its only value."""
        return await self.run(lambda conn: conn.scalar(text(query)))

    @property
    def sync_engine(self) -> Engine:
        """The engine that has the pool and the events."""
        return self.engine.sync_engine if isinstance(self.engine, AsyncEngine) else self.engine

    @property
    def pool(self) -> ConnectionPool[Any] | AsyncConnectionPool[Any]:
        """The reservoir's pool."""
        return reservoir_of(self.engine)

    @property
    def now(self) -> Statistics:
        """The statistics of the reservoir."""
        return self.pool.statistics()

    @property
    def full(self) -> bool:
        """Whether all connections are open, and no connect is in progress."""
        now = self.now
        there = now.size + now.in_use
        return there == now.target and not (now.in_flight or now.closing)


def backends(url: str) -> set[int]:
    """The process ids of the server's other connections to this database."""
    query = """select pid from pg_stat_activity
               where datname = current_database() and pid <> pg_backend_pid()"""
    with psycopg.connect(url, autocommit=True) as conn:
        return {pid for (pid,) in conn.execute(query)}


async def left(url: str, *pids: int) -> None:
    """Wait until these are the only connections; a backend ends a moment after its client."""
    await until(lambda: backends(url) == set(pids), f"only {pids} are left")


def terminate(url: str, *pids: int) -> None:
    """Terminate backends, and wait for their end."""
    with psycopg.connect(url, autocommit=True) as conn:
        for pid in pids:
            conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
