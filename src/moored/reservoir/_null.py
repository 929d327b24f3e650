"""Pools that keep nothing: each caller gets a connection of its own, as from psycopg_pool's.

What such a pool is still good for: the number of connections has a limit, callers wait in a queue,
and connections are opened within the rate. One that comes back goes to a caller that waits; if none
does, it is closed.
"""

from __future__ import annotations

from typing import Any

from moored.kernel import refuse, unmet

from ._config import ReservoirConfig
from ._errors import PoolTimeout
from ._pool import Pool
from ._pool_async import AsyncConnectionPool
from ._pool_threads import ConnectionPool
from ._recipe import Conninfo
from ._types import AnyC as C
from ._types import AsyncC, ThreadsC

__all__ = ["AsyncNullConnectionPool", "NullConnectionPool"]

#: How many connections there may be if nobody says.
MANY = 10_000


class _KeepsNothing(Pool[C]):
    """The common part of the two: how they are configured."""

    def __init__(
        self,
        conninfo: Conninfo = "",
        *,
        min_size: int = 0,
        max_size: int | None = None,
        config: ReservoirConfig | None = None,
        **settings: Any,
    ) -> None:
        most = self._most(min_size, max_size)
        config = (config or ReservoirConfig()).but(
            enabled=False, keep=False, max_size=most, target_ready=None, low_watermark=None
        )
        super().__init__(conninfo, config=config, **settings)

    def _resize(self, min_size: int, max_size: int | None) -> None:
        super()._resize(0, self._most(min_size, max_size))

    def _most(self, min_size: int, max_size: int | None) -> int:
        mistakes = unmet(
            ("min_size", min_size, not min_size, "0: such a pool keeps no connections"),
            ("max_size", max_size, (max_size or 0) >= 0, "at least 0 (0 for any number)"),
        )
        refuse(type(self).__name__, mistakes)
        return max_size or MANY


class NullConnectionPool(_KeepsNothing[ThreadsC], ConnectionPool[ThreadsC]):
    """A pool for threads that keeps no connections.

    :param max_size: how many connections there may be at a time; 0, or None, for any number.
    """

    def wait(self, timeout: float = 30.0) -> None:
        """Open a connection and close it; if that takes too long, `PoolTimeout`, and the pool is
        closed."""
        try:
            with self.connection(timeout):
                pass
        except PoolTimeout:
            self.close()
            raise


class AsyncNullConnectionPool(_KeepsNothing[AsyncC], AsyncConnectionPool[AsyncC]):
    """A pool for asyncio that keeps no connections.

    :param max_size: how many connections there may be at a time; 0, or None, for any number.
    """

    async def wait(self, timeout: float = 30.0) -> None:
        """Open a connection and close it; if that takes too long, `PoolTimeout`, and the pool is
        closed."""
        try:
            async with self.connection(timeout):
                pass
        except PoolTimeout:
            await self.close()
            raise
