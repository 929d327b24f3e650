"""The pools that pool.py compares: all of the same size, and open at the same time."""

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

    #: Returns a context manager that holds a connection, such as `pool.connection`.
    block: Callable[[], Any]
    #: The pool, if it counts its checkouts.
    pool: Any = None

    def pop(self) -> Mapping[str, int]:
        """Return the pool's counters since the last call."""
        stats: Mapping[str, int] = {} if self.pool is None else self.pool.pop_stats()
        return stats

    def check(self, count: int, *, contended: bool) -> None:
        """Check that the pool counted all checkouts, and that callers waited only if contended."""
        if self.pool is None:
            return
        stats = self.pop()
        if stats["requests_num"] != count or stats.get("requests_errors", 0):
            raise AssertionError(f"{self.pool!r} did not count {count} checkouts: {stats}")
        waited = stats.get("requests_queued", 0) / count
        if (waited < 0.9) if contended else waited:
            raise AssertionError(f"{waited:.0%} of the callers waited: {stats}")


class Floor:
    """A minimal asyncio pool, as the lower bound: a deque, and a context manager."""

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


async def no_reset(conn: Any) -> None:
    """Skip the reset query that asyncpg's pool sends at each release."""


async def open_asyncpg(url: str) -> Any:
    return await asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE, reset=no_reset)


@contextmanager
def async_sides(url: str, runner: asyncio.Runner) -> Iterator[dict[str, Side]]:
    """Open the asyncio pools, all on one loop."""
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
    """Open the thread pools."""
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
    """Create async SQLAlchemy engines, one on a reservoir and one with its own QueuePool."""
    options: dict[str, Any] = {"pool_size": SIZE, "max_overflow": 0}
    ours = ours_sqlalchemy.create_async_engine(psycopg_url(url), **options)
    peer = create_async_engine(psycopg_url(url), **options)
    runner.run(ours_sqlalchemy.reservoir_of(ours).open(wait=True))
    runner.run(_fill_async(peer))
    yield {"ours": Side(ours.connect), "queuepool": Side(peer.connect)}
    for engine in (ours, peer):
        runner.run(engine.dispose())


async def _fill_async(engine: Any) -> None:
    """Let a QueuePool open all its connections, as the reservoir has."""
    for conn in [await engine.connect() for _ in range(SIZE)]:
        await conn.close()


@contextmanager
def thread_engines(url: str) -> Iterator[dict[str, Side]]:
    """Create SQLAlchemy engines, one on a reservoir and one with its own QueuePool."""
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
    """Open pools of asyncpg connections, both with a reset query at each return."""
    ours: Any = AsyncConnectionPool(url, connect=asyncpg.connect, max_size=SIZE, open=False)
    runner.run(ours.open())
    runner.run(ours.wait())
    peer = runner.run(_create_asyncpg(url))
    yield {"ours": Side(ours.connection, ours), "asyncpg_pool": Side(peer.acquire)}
    for pool in (ours, peer):
        runner.run(pool.close())


async def _create_asyncpg(url: str) -> Any:
    return await asyncpg.create_pool(url, min_size=SIZE, max_size=SIZE)
