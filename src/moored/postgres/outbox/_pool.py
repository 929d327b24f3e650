"""The connections of the outbox of a `Postgres`: few, and apart from those of its callers.

They need neither the lock of the stream, nor a place in the pool of the callers, nor the pooler: if
`database_url` cannot be reached, they lead to `replication_url`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakSet

import psycopg

from moored.kernel import Clock, Recorder, describe
from moored.reservoir import AsyncConnectionPool, PoolClosed

from .._settings import Settings
from ..server import Resolver, connect, cut
from ..stream import KEEPALIVES

__all__ = ["OutboxPool"]

log = logging.getLogger("moored.postgres")

#: Connections at most; one is kept.
SIZE = 4
#: The timeout of an attempt by the first URL while there is another one, in seconds.
TRIAL = 5.0


class OutboxPool:
    """A pool that is opened at its first use, and again at the next one after `close()`.

    :param awake: returns a context manager that keeps the connections of the `Postgres` from
        sleeping, and raises if it is not open.
    """

    def __init__(
        self,
        settings: Settings,
        awake: Callable[[], AbstractAsyncContextManager[None]],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._awake = awake
        self._clock, self._recorder = clock, recorder
        self._urls = list(dict.fromkeys((settings.database_url, settings.replication_url)))
        timeout = settings.connect_timeout
        self._timeout = min(TRIAL, timeout) if len(self._urls) > 1 else timeout
        self._resolver = Resolver(timeout=self._timeout)
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]] | None = None
        # The connections by the first URL.
        self._first: WeakSet[psycopg.AsyncConnection[Any]] = WeakSet()
        self._opening = asyncio.Lock()
        self._fell_back = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Check out a connection, which is in autocommit mode."""
        checkout, conn = await self._checked_out()
        async with checkout:
            yield conn

    async def _checked_out(self) -> tuple[AsyncExitStack, psycopg.AsyncConnection[Any]]:
        """Check out a connection of the pool; of the next one if that is closed meanwhile."""
        while True:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._awake())
                pool = await self._opened()
                try:
                    conn = await stack.enter_async_context(pool.connection())
                except PoolClosed:
                    if self._pool is pool:
                        raise
                    continue
                return stack.pop_all(), conn

    @property
    def silent_for(self) -> float:
        """Seconds for which the server has not answered; 0.0 if it answers."""
        return 0.0 if self._pool is None else self._pool.silent_for

    async def close(self) -> None:
        """Close all connections; the next use opens others."""
        async with self._opening:
            pool, self._pool = self._pool, None
            if pool is not None:
                await pool.close()

    async def _opened(self) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
        async with self._opening:
            if self._pool is None:
                pool = AsyncConnectionPool(
                    connect=self._connect,
                    min_size=1,
                    max_size=SIZE,
                    open=False,
                    name=f"postgres.{self._settings.stream_id}.outbox",
                    clock=self._clock,
                    recorder=self._recorder,
                )
                self._pool = await pool.__aenter__()  # which closes it if this is cancelled
            return self._pool

    async def _connect(self, **_: Any) -> psycopg.AsyncConnection[Any]:
        """Connect by the first URL that works."""
        first: Exception | None = None
        for url in self._urls:
            try:
                conn = await self._connect_by(url)
            except (psycopg.Error, OSError) as error:  # a timeout, too
                first = first or error
                continue
            self._report(first)
            if first is None:
                self._first.add(conn)
            elif isinstance(first, TimeoutError):
                # What a frozen pooler was asked for would be waited for until it goes on.
                for each in self._first:
                    cut(each)
            return conn
        assert first is not None
        raise first

    async def _connect_by(self, url: str) -> psycopg.AsyncConnection[Any]:
        async with asyncio.timeout(self._timeout):
            return await connect(
                await self._resolver.conninfo(url),
                application_name=self._settings.application_name,
                **KEEPALIVES,
            )

    def _report(self, failure: Exception | None) -> None:
        """Log it when the pooler cannot be reached, and when it can again."""
        before, self._fell_back = self._fell_back, failure is not None
        if failure is not None and not before:
            why = describe(failure)
            log.warning("the outbox uses replication_url: database_url is not reached: %s", why)
        elif before and failure is None:
            log.info("the outbox uses database_url again")
