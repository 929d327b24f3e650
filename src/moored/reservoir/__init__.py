"""Connections that are ready before they are needed, and pools that never stampede.

A server may limit how fast connections are opened, how long they live, and how many there are. A
pool that opens them when it needs them meets all three limits at the worst time; this one opens
them ahead, at a limited rate, and replaces them one by one before they end::

    async with AsyncConnectionPool("postgresql://app@db/orders", max_size=50) as pool:
        async with pool.connection() as conn:
            await conn.execute("insert into orders values (1)")

What always holds:

- a connection has one holder, and callers that wait are served in the order in which they came;
- none is handed out, or kept, within its guard window;
- ready, in use, opening and closing together are never more than `max_size`;
- connections are opened within the rate, over restarts of the refiller too;
- each lease is given back once, whatever fails;
- a child process never uses a connection of its parent.
"""

from ._config import ReservoirConfig
from ._errors import (
    PoolClosed,
    PoolOverloaded,
    PoolTimeout,
    ReservoirEmpty,
    ReservoirError,
    ServerUnreachable,
    TokenError,
)
from ._null import AsyncNullConnectionPool, NullConnectionPool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._reservoir import Reservoir
from ._retry import retry_transaction
from ._statistics import Statistics
from ._tokens import CachedTokens, Token, TokenProvider

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # What users call
    "AsyncConnectionPool",
    "AsyncNullConnectionPool",
    "ConnectionPool",
    "NullConnectionPool",
    "Reservoir",
    "ReservoirConfig",
    "Statistics",
    "retry_transaction",
    # Passwords that end
    "CachedTokens",
    "Token",
    "TokenProvider",
    # Errors
    "PoolClosed",
    "PoolOverloaded",
    "PoolTimeout",
    "ReservoirEmpty",
    "ReservoirError",
    "ServerUnreachable",
    "TokenError",
]
