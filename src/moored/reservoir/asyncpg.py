"""`asyncpg.create_pool` over a reservoir: services on asyncpg change one import.

::

    from moored.reservoir.asyncpg import create_pool

    async with create_pool("postgresql://app@db/orders", max_size=20, init=set_codecs) as pool:
        rows = await pool.fetch("select * from orders where state = $1", "new")
        async with pool.acquire() as conn, conn.transaction():
            await conn.execute("update orders set state = 'paid'")

The connections are asyncpg's own, and are reset when they are returned, as by asyncpg's pool. This
module needs `moored[asyncpg]`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Self

from moored.kernel import Tasks, extra

with extra("asyncpg", "moored.reservoir.asyncpg"):
    import asyncpg

from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._config import ReservoirConfig
from ._pool_async import AsyncConnectionPool, _AsyncCheckout
from ._tokens import Provider, Tokens

__all__ = ["AsyncpgPool", "create_pool"]

Callback = Callable[[Any], Awaitable[object]]

# Pools that were terminated, and are closing.
_closing = Tasks()


def create_pool(
    dsn: str | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    init_size: int | None = None,
    max_queries: int | None = None,
    max_inactive_connection_lifetime: float = 300.0,
    connect: Callable[..., Any] | None = None,
    setup: Callback | None = None,
    init: Callback | None = None,
    reset: Callback | None = None,
    loop: object = None,
    acquire_timeout: float = 30.0,
    name: str | None = None,
    config: ReservoirConfig | None = None,
    creation_rate: float | None = None,
    tokens: Tokens | Provider | None = None,
    leases: Leases | leases_sync.SyncLeases | str | None = None,
    **connect_kwargs: Any,
) -> AsyncpgPool:
    """Create a pool; like asyncpg's `create_pool`, to be awaited or entered.

    The parameters are asyncpg's, except the last ones, which are those of `AsyncConnectionPool`.

    :param min_size: the number of connections to keep; `max_size` by default.
    :param init_size: accepted and not used: all connections are opened in advance.
    :param max_queries: accepted and not used: connections are replaced by their age.
    :param max_inactive_connection_lifetime: seconds after which connections above `min_size` that
        were not needed are closed; 0 for never.
    :param connect: called instead of `asyncpg.connect`.
    :param setup: called with a connection each time before it is handed out.
    :param init: called with each new connection.
    :param reset: called when a connection is returned, instead of `Connection.reset()`.
    :param loop: accepted and not used: the pool runs on the loop that uses it first.
    :param acquire_timeout: how long a caller waits for a connection, unless it passes a timeout.
    :param connect_kwargs: those of `asyncpg.connect`.
    """
    pool = AsyncpgPool(
        dsn or "",
        connect=connect or asyncpg.connect,
        kwargs=connect_kwargs,
        min_size=min_size,
        max_size=max_size,
        max_idle=max_inactive_connection_lifetime or math.inf,
        configure=init,
        reset=reset,
        timeout=acquire_timeout,
        name=name,
        config=config,
        creation_rate=creation_rate,
        tokens=tokens,
        leases=leases,
    )
    pool.setup = setup
    return pool


def _delegated(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method of the pool that calls a method of one of its connections."""

    async def call(self: AsyncpgPool, *args: Any, **kwargs: Any) -> Any:
        async with self.acquire() as conn:
            return await getattr(conn, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Call `{name}` of one of the connections."
    return call


class AsyncpgPool(AsyncConnectionPool[Any]):
    """The pool of `create_pool`: an `AsyncConnectionPool` that also has asyncpg's methods."""

    #: Called with a connection each time before `acquire` hands it out.
    setup: Callback | None = None

    def acquire(self, *, timeout: float | None = None) -> _Acquire:
        """Check out a connection: `async with pool.acquire()`, or await it and `release()`."""
        acquire = _Acquire()
        acquire._pool, acquire._timeout = self, timeout
        return acquire

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        """Return a connection of `await pool.acquire()`; do nothing if it was returned before."""
        await self._return(connection)

    execute = _delegated("execute")
    executemany = _delegated("executemany")
    fetch = _delegated("fetch")
    fetchval = _delegated("fetchval")
    fetchrow = _delegated("fetchrow")
    fetchmany = _delegated("fetchmany")
    copy_from_table = _delegated("copy_from_table")
    copy_from_query = _delegated("copy_from_query")
    copy_to_table = _delegated("copy_to_table")
    copy_records_to_table = _delegated("copy_records_to_table")

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        """Open `min_size` connections; after `acquire_timeout`, close and raise `PoolTimeout`."""
        await super().__aenter__()
        await self.wait(self.timeout)
        return self

    async def expire_connections(self) -> None:
        """Replace all connections: ready ones now, those in use when they are returned."""
        await self.drain()

    def terminate(self) -> None:
        """Abort all connections, also those in use, and close the pool."""
        for item in [*self._core.items.values()]:
            item.conn.terminate()
        _closing.start(self.close(), name=f"{self.name}-close")

    def is_closing(self) -> bool:
        """Whether the pool was closed."""
        return self.closed

    def get_size(self) -> int:
        """The number of connections."""
        return len(self._core.items)

    def get_init_size(self) -> int:
        """The number of connections that are opened at first: `min_size`."""
        return self.min_size

    def get_min_size(self) -> int:
        """The number of connections that the pool keeps open."""
        return self.min_size

    def get_max_size(self) -> int:
        """The maximum number of connections."""
        return self.max_size

    def get_idle_size(self) -> int:
        """The number of ready connections."""
        return self.statistics().size


class _Acquire(_AsyncCheckout[Any]):
    """What `acquire()` returns, to be entered or awaited."""

    __slots__ = ()

    _pool: AsyncpgPool

    def __aenter__(self) -> Coroutine[Any, Any, Any]:
        entering = super().__aenter__()
        return entering if self._pool.setup is None else self._enter(entering, self._pool.setup)

    async def _enter(self, entering: Coroutine[Any, Any, Any], setup: Callback) -> Any:
        conn = await entering
        try:
            await setup(conn)
        except BaseException as error:
            conn.terminate()
            await self.__aexit__(type(error), error, None)
            raise
        return conn

    def __await__(self) -> Generator[Any, None, Any]:
        return self._take().__await__()

    async def _take(self) -> Any:
        pool = self._pool
        conn = await pool.getconn(self._timeout)
        try:
            if pool.setup is not None:
                await pool.setup(conn)
        except BaseException:
            conn.terminate()
            await pool.release(conn)
            raise
        return conn
