"""The base of both layouts: the table, the rate limits, opening and closing."""

from __future__ import annotations

from typing import Any, ClassVar

from moored.kernel import Clock

from .._store import Grant, Request, Taken
from ._config import DynamoConfig
from ._items import text
from ._link import DynamoLink
from ._rate import DynamoRate
from ._table import DynamoTable
from ._time import ServerTime

__all__ = ["DynamoStore"]

_RATE = "moored_rate#"


class DynamoStore:
    """A table of leases and rate limits; subclasses define how leases are stored."""

    #: The key attributes of a rate limit's item besides `pk`.
    _more_key: ClassVar[dict[str, Any]]

    def __init__(
        self, config: DynamoConfig, *, clock: Clock, time: ServerTime | None = None
    ) -> None:
        self.link = DynamoLink(config, clock=clock, time=time)
        self._table = DynamoTable(self.link)
        self._time = self.link.time
        self._rate = DynamoRate(
            self._table, lambda key: {"pk": text(_RATE + key), **self._more_key}
        )

    async def open(self) -> None:
        """Check the table, and create it if it is missing and `create` allows it."""
        await self._ready()

    async def close(self) -> None:
        """Close the connections; leases stay as they are."""
        await self.link.close()

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None."""
        await self._ready()
        return await self._time.settled(lambda lives: self._acquire(request, lives))

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""
        return await self._rate.take(key, rate=rate, burst=burst, tokens=tokens)

    async def _ready(self) -> None:
        await self._table.ready()

    async def _acquire(self, request: Request, lives: int) -> Grant | None:
        raise NotImplementedError

    def __repr__(self) -> str:
        sent = sum(self.link.requests.values())
        return f"<{type(self).__name__} {self.link.config.place}, {sent} requests>"
