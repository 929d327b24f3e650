"""The pools that benchmarks/pool.py compares: all of one size, and all open at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import asyncpg
import psycopg_pool
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from moored.reservoir import AsyncConnectionPool, ConnectionPool
from moored.reservoir import sqlalchemy as ours_sqlalchemy

SIZE = 10


class Side(NamedTuple):
    """One pool of the comparison."""

    #: Opens a block in which a connection is held: `pool.connection`, or what the peer calls it.
    block: Callable[[], Any]
    #: The pool, if it keeps a count of its checkouts.
    pool: Any = None

    def pop(self) -> Mapping[str, int]:
        """What the pool has counted since the last time."""
        stats: Mapping[str, int] = {} if self.pool is None else self.pool.pop_stats()
        return stats

    def check(self, count: int, *, contended: bool) -> None:
        """A pool must not win by skipping work, nor by never being short of connections."""
        if self.pool is None:
            return
        stats = self.pop()
        if stats["requests_num"] != count or stats.get("requests_errors", 0):
            raise AssertionError(f"{self.pool!r} did not count {count} checkouts: {stats}")
        waited = stats.get("requests_queued", 0) / count
        if (waited < 0.9) if contended else waited:
            raise AssertionError(f"{waited:.0%} of all callers waited: {stats}")


class Floor:
    """The least that a pool under asyncio can be: a deque, and a class for the block."""

    def __init__(self) -> None:
        self._ready = deque(object() for _ in range(SIZE))

    def connection(self) -> FloorBlock:
        return FloorBlock(self._ready)


class FloorBlock:
    __slots__ = ("_conn", "_ready")

    def __init__(self, ready: deque[object]) -> None:
        self._ready = ready

    async def __aenter__(self) -> object:
        self._conn = self._ready.popleft()
        return self._conn

    async def __aexit__(self, *_: object) -> None:
        self._ready.append(self._conn)


def psycopg_url(url: str) -> URL:
    return make_url(url).set(drivername="postgresql+psycopg")


async def leave_as_it_is(conn: Any) -> None:
    """asyncpg's pool would ask the server to reset each connection: a query, and none is asked."""


async def open_asyncpg(url: str) -> Any:
    return await asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE, reset=leave_as_it_is)


@contextmanager
def async_sides(url: str, runner: asyncio.Runner) -> Iterator[dict[str, Side]]:
    """The pools for asyncio, all open on one loop."""
    ours: Any = AsyncConnectionPool(url, max_size=SIZE, open=False)
    peer: Any = psycopg_pool.AsyncConnectionPool(url, min_size=SIZE, max_size=SIZE, open=False)
    engine = create_async_engine(psycopg_url(url), pool_size=SIZE, max_overflow=0)
    asyncpgs = runner.run(open_asyncpg(url))
    for pool in (ours, peer):
        runner.run(pool.open())
        runner.run(pool.wait())
    yield {
        "ours": Side(ours.connection, ours),
        "psycopg_pool": Side(peer.connection, peer),
        "asyncpg": Side(asyncpgs.acquire),
        "sqlalchemy": Side(engine.connect),
    }
    for close in (ours.close, peer.close, asyncpgs.close, engine.dispose):
        runner.run(close())


@contextmanager
def thread_sides(url: str) -> Iterator[dict[str, Side]]:
    """The pools for threads."""
    ours: Any = ConnectionPool(url, max_size=SIZE, open=False)
    peer: Any = psycopg_pool.ConnectionPool(url, min_size=SIZE, max_size=SIZE, open=False)
    engine = create_engine(psycopg_url(url), pool_size=SIZE, max_overflow=0)
    for pool in (ours, peer):
        pool.open()
        pool.wait()
    yield {
        "ours": Side(ours.connection, ours),
        "psycopg_pool": Side(peer.connection, peer),
        "sqlalchemy": Side(engine.connect),
    }
    for close in (ours.close, peer.close, engine.dispose):
        close()


@contextmanager
def async_engines(url: str, runner: asyncio.Runner) -> Iterator[dict[str, Side]]:
    """SQLAlchemy's engine on a reservoir, and with its own QueuePool, for asyncio."""
    options: dict[str, Any] = {"pool_size": SIZE, "max_overflow": 0}
    ours = ours_sqlalchemy.create_async_engine(psycopg_url(url), **options)
    peer = create_async_engine(psycopg_url(url), **options)
    runner.run(ours_sqlalchemy.reservoir_of(ours).open(wait=True))
    runner.run(_fill_async(peer))
    yield {"ours": Side(ours.connect), "queuepool": Side(peer.connect)}
    for engine in (ours, peer):
        runner.run(engine.dispose())


async def _fill_async(engine: Any) -> None:
    """Let a QueuePool open all its connections, so that both sides have as many in turn."""
    for conn in [await engine.connect() for _ in range(SIZE)]:
        await conn.close()


@contextmanager
def thread_engines(url: str) -> Iterator[dict[str, Side]]:
    """The same for threads."""
    options: dict[str, Any] = {"pool_size": SIZE, "max_overflow": 0}
    ours = ours_sqlalchemy.create_engine(psycopg_url(url), **options)
    peer = create_engine(psycopg_url(url), **options)
    ours_sqlalchemy.reservoir_of(ours).open(wait=True)
    for conn in [peer.connect() for _ in range(SIZE)]:
        conn.close()
    yield {"ours": Side(ours.connect), "queuepool": Side(peer.connect)}
    for engine in (ours, peer):
        engine.dispose()


@contextmanager
def asyncpg_sides(url: str, runner: asyncio.Runner) -> Iterator[dict[str, Side]]:
    """Pools of asyncpg's connections, both of which reset the session of each that comes back."""
    ours: Any = AsyncConnectionPool(url, connect=asyncpg.connect, max_size=SIZE, open=False)
    runner.run(ours.open())
    runner.run(ours.wait())
    peer = runner.run(_create_asyncpg(url))
    yield {"ours": Side(ours.connection, ours), "asyncpg_pool": Side(peer.acquire)}
    for pool in (ours, peer):
        runner.run(pool.close())


async def _create_asyncpg(url: str) -> Any:
    return await asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE)
