"""Null pools, as in psycopg_pool: they keep no idle connections.

They still limit the number of connections and the rate at which these are opened, and callers wait
in a queue. A returned connection goes to the next waiting caller, or is closed if none waits.
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

#: The maximum number of connections if no `max_size` is given.
UNLIMITED = 10_000


class _NullPool(Pool[C]):
    """The common part of the two null pools: their configuration."""

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
            ("min_size", min_size, not min_size, "0: a null pool keeps no connections"),
            ("max_size", max_size, (max_size or 0) >= 0, "at least 0 (0 for no limit)"),
        )
        refuse(type(self).__name__, mistakes)
        return max_size or UNLIMITED


class NullConnectionPool(_NullPool[ThreadsC], ConnectionPool[ThreadsC]):
    """A pool for threads that keeps no connections.

    :param max_size: the maximum number of connections; 0 or None for no limit.
    """

    def wait(self, timeout: float = 30.0) -> None:
        """Open a connection and close it again.

        After the timeout, close the pool and raise `PoolTimeout`.
        """
        try:
            with self.connection(timeout):
                pass
        except PoolTimeout:
            self.close()
            raise


class AsyncNullConnectionPool(_NullPool[AsyncC], AsyncConnectionPool[AsyncC]):
    """A pool for asyncio that keeps no connections.

    :param max_size: the maximum number of connections; 0 or None for no limit.
    """

    async def wait(self, timeout: float = 30.0) -> None:
        """Open a connection and close it again.

        After the timeout, close the pool and raise `PoolTimeout`.
        """
        try:
            async with self.connection(timeout):
                pass
        except PoolTimeout:
            await self.close()
            raise
