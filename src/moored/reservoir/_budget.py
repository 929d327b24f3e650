"""The limits that all reservoirs of one process to one endpoint and user share.

A server limits its users, not their pools: two pools that each keep to a limit exceed it together.
So they share the rate limit, the number of connects in progress, and the lease client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from moored.kernel import Clock
from moored.leases import Lease, LeaseError, Leases, MemoryStore, connect

from ._config import ReservoirConfig
from ._silence import Silence

if TYPE_CHECKING:
    from ._reservoir import Reservoir

__all__ = ["Budget", "Destination", "LeaseDenied", "RateTimeout"]

log = logging.getLogger("moored.reservoir")

#: How long a connect waits for its turn under the rate limit before it releases its lease.
RATE_PATIENCE = 30.0
#: For how many unused servers the state of the rate limit is kept.
_REMEMBERED = 64


class Destination(NamedTuple):
    """A server's address, and the user that connects to it."""

    address: str
    user: str = ""

    def __str__(self) -> str:
        return f"{self.user}@{self.address}" if self.user else self.address


class LeaseDenied(LeaseError):
    """The cluster has `lease_limit` connections already."""


class RateTimeout(LeaseError, TimeoutError):
    """The rate limit did not allow a connect in time."""


class Budget:
    """The rate limit, the lease client and the connect slots of one endpoint, on one event loop.

    `Budget.of` returns the shared instance. Each reservoir enters it while it runs.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[object, ...], Budget]] = WeakValueDictionary()
    # The rate limit holds for the whole process, on however many loops its pools run.
    _stores: ClassVar[WeakValueDictionary[tuple[Clock, str], MemoryStore]] = WeakValueDictionary()
    # Kept for a while after their last use, so that a recreated pool does not get a new burst.
    _unused: ClassVar[deque[MemoryStore]] = deque(maxlen=_REMEMBERED)

    def __init__(self, endpoint: Destination, user: Reservoir[Any]) -> None:
        self.endpoint = endpoint
        self.config = config = user.config
        self._clock = user.clock
        leases = user.leases
        self._leases_given = leases is not None
        self._users = 0
        self._store: MemoryStore | None = None
        self._opening = asyncio.Lock()
        #: What each reservoir knows about the server: one silence is reported by all of them. Each
        #: change replaces the set, which other threads may be reading.
        self.silences: frozenset[Silence] = frozenset()
        #: One for each connect in progress.
        self.slots = asyncio.Semaphore(config.max_in_flight)
        if leases is None:
            leases = self._make_leases(user.service)
        self.leases = leases
        # Keyed by the address alone: the server's limit applies to all its users together.
        self.rate = leases.rate_limit(
            f"connects:{endpoint.address}", rate=config.rate, burst=config.burst
        )

    @classmethod
    def of(cls, endpoint: Destination, user: Reservoir[Any]) -> Budget:
        """Return the budget of this endpoint on the running loop; create it at first use."""
        config = user.config
        key = (asyncio.get_running_loop(), endpoint, user.leases or config.lease_url)
        budget = cls._shared.get(key)
        if budget is None:
            budget = cls(endpoint, user)
            cls._shared[key] = budget
        elif (config.rate, config.burst) not in (
            (budget.config.rate, budget.config.burst),
            (ReservoirConfig.rate, ReservoirConfig.burst),  # it has set none
        ):
            log.warning(
                "a pool to %s is configured with %g connects per second, which is ignored: another "
                "pool to the same server has set %g, and all of them share that limit; configure "
                "the same rate for all of them",
                endpoint,
                config.rate,
                budget.config.rate,
            )
        return budget

    def _make_leases(self, service: str) -> Leases:
        options: dict[str, Any] = {
            "service_name": service,
            "owner": str(self.endpoint),
            "clock": self._clock,
            "name": "reservoir.leases",
        }
        if self.config.lease_url is not None:
            return connect(self.config.lease_url, **options)
        place = (self._clock, self.endpoint.address)
        store = self._stores.get(place)
        if store is None:
            store = self._stores[place] = MemoryStore(clock=self._clock)
        self._store = store
        return Leases(store, place="memory", **options)

    # -- life ----------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Register a reservoir; the first one opens the lease client."""
        if self.leases._loop not in (None, asyncio.get_running_loop()):
            raise LeaseError(
                f"{self.leases!r} was opened on another event loop than this pool: pass a URL as "
                "leases=, or a client of moored.leases.connect() to an AsyncConnectionPool, and of "
                "moored.leases.sync.connect() to a ConnectionPool"
            )
        async with self._opening:
            if not self._leases_given and not self._users:
                try:
                    await self.leases.open()
                except BaseException:
                    self._forget()
                    raise
            self._users += 1

    async def leave(self) -> None:
        """Unregister a reservoir; the last one closes the lease client."""
        async with self._opening:
            self._users -= 1
            if self._users == 0 and not self._leases_given:
                self._forget()
                if self._store is not None:
                    self._unused.append(self._store)
                await self.leases.close()

    @classmethod
    def forget_all(cls) -> None:
        """Forget the parent's budgets in a forked child: their locks may be held for ever."""
        cls._shared = WeakValueDictionary()
        cls._stores = WeakValueDictionary()

    def _forget(self) -> None:
        """Remove this budget: a closed lease client cannot be opened again."""
        for key in [key for key, budget in self._shared.items() if budget is self]:
            del self._shared[key]

    # -- the steps before a connect, in this order ----------------------------------------------

    async def lease(self, config: ReservoirConfig) -> Lease | None:
        """Acquire the lease of one connection; None if leases are off."""
        if not config.lease_enabled:
            return None
        lease = await self.leases.acquire(
            f"connections:{self.endpoint.address}", limit=config.lease_limit, ttl=config.lease_ttl
        )
        if lease is None:
            raise LeaseDenied(
                f"the cluster has {config.lease_limit} connections to {self.endpoint.address} "
                "already (lease_limit): raise it, or wait until others have closed theirs"
            )
        return lease

    async def turn(self) -> None:
        """Wait for a turn under the rate limit."""
        try:
            async with asyncio.timeout(RATE_PATIENCE):
                await self.rate.wait()
        except TimeoutError:
            why = self.rate._too_slow or (
                f"more than {self.config.rate:g} connections per second are wanted in the cluster"
            )
            raise RateTimeout(
                f"the rate limit allowed no connect to {self.endpoint} within {RATE_PATIENCE:g} s: "
                f"{why}"
            ) from None
