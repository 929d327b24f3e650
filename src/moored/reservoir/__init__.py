"""Connections that are ready before they are needed, and pools that never stampede.

A server may limit how fast connections are opened, how long they live, and how many there are. A
pool that opens connections on demand hits these limits when the load is highest; this one opens
them in advance, at a limited rate, and replaces them one by one before they expire::

    async with AsyncConnectionPool("postgresql://app@db/orders", max_size=50) as pool:
        async with pool.connection() as conn:
            await conn.execute("insert into orders values (1)")

Invariants:

- a connection has one holder, and waiting callers are served in the order of their arrival;
- no connection is handed out, or kept, within its guard window;
- ready, in use, opening and closing connections together are never more than `max_size`;
- connections are opened within the rate limit, also across restarts of the refiller;
- each lease is released exactly once, whatever fails;
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
    TooManyRequests,
)
from ._null import AsyncNullConnectionPool, NullConnectionPool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._reservoir import Reservoir
from ._retry import retry_transaction
from ._statistics import BUCKETS, Statistics
from ._tokens import CachedTokens, Token, TokenProvider

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # What users call
    "AsyncConnectionPool",
    "AsyncNullConnectionPool",
    "ConnectionPool",
    "NullConnectionPool",
    "Reservoir",
    "ReservoirConfig",
    "BUCKETS",
    "Statistics",
    "retry_transaction",
    # Passwords that expire
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
    "TooManyRequests",
]
