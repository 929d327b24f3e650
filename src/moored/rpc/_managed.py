"""One shared connection as users see it: its handler, where it leads, and who uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ._clients import Clients
from ._config import ConnectionConfig
from ._core import CHART, Actions, ConnectionCore

__all__ = ["ManagedConnection"]

H = TypeVar("H")

#: States in which a connection can be handed out at once (see `ConnectionCore.usable`).
_USABLE = (CHART.find("ready/serving"), CHART.find("ready/renewing"))


class ManagedConnection(Generic[H]):
    """A connection in the manager's book.

    The handler stays the same for the whole life of this; the channel in it is replaced.
    """

    def __init__(
        self,
        handler: H,
        config: ConnectionConfig,
        strategy: Any,
        core: ConnectionCore,
        *,
        key: str,
        dedicated: bool,
        created_at: float,
        connect_timeout: float,
    ) -> None:
        self.handler = handler
        self.config = config
        self.strategy = strategy
        self.core = core
        #: Under which it stands in the book; a dedicated one has a number in it.
        self.key = key
        self.dedicated = dedicated
        #: When it was made, and below, when it was last used: by the manager's monotonic clock.
        self.created_at = created_at
        self.connect_timeout = connect_timeout
        #: Where the current channel leads.
        self.address = config.address
        #: Those who said who they are, each as itself; they are forgotten when they are gone.
        self.clients: Clients[object] = Clients()
        #: Those who did not, and have not released it. Who gives it back too often is taken for
        #: another of them: see `part`.
        self.anonymous = 0
        #: Leaves the handler to whoever may still hold it, before this is closed because nobody
        #: seems to have it: a call over it opens a connection again. Says whether it has; calls may
        #: have begun. Set by its manager, called under its lock.
        self.detach: Callable[[], bool] = lambda: True
        #: Since when nobody has it.
        self.unused_since: float | None = None
        self.waiters: list[asyncio.Future[None]] = []
        #: The attempt that is under way, or was the last.
        self.dial: asyncio.Task[None] | None = None
        #: How many times rarer than configured pings are sent, as the server has received too many.
        self.ping_factor = 1
        #: During which generation calls were not sent: that is told once.
        self.unsent_in = -1

    @property
    def generation(self) -> int:
        """Which channel is the current one; it grows with each that replaces another."""
        return self.core.generation

    @property
    def trouble(self) -> str:
        """What keeps an attempt that goes on from going further; "" if nobody knows."""
        return str(getattr(self.strategy, "trouble", ""))

    @property
    def last_used_at(self) -> float:
        """When it was last handed out, or a call made over it."""
        return max(self.core.last_used_at, self.called_at)

    @property
    def called_at(self) -> float:
        """When a call was last made over it."""
        return getattr(self.handler, "_used_at", 0.0)

    def hand_out(self, client: object | None, now: float) -> bool:
        """Hand it out, if that can be done as it is: it is connected, and was used lately.

        Written out, with each thing looked up once: this is what nearly every caller meets.
        """
        core = self.core
        if core.machine.state not in _USABLE:
            return False
        # What is cheap to look at first: calls are noted by the handler, and not here.
        if now - core.last_used_at > core.idle and now - self.last_used_at > core.idle:
            return False
        if client is None:
            self.anonymous += 1
        else:
            self.clients.add(client)
        core.last_used_at = now
        self.unused_since = None
        return True

    def requested(self, now: float) -> Actions:
        """A caller wants it."""
        self.core.used(self.last_used_at)
        return self.core.requested(now)

    def taken(self, client: object | None) -> None:
        """Count a client that has the connection."""
        self.unused_since = None
        if client is None:
            self.anonymous += 1
        else:
            self.clients.add(client)

    def given_back(self, client: object | None) -> None:
        """Forget a client; calling it twice is harmless."""
        if client is not None:
            self.clients.discard(client)
        elif self.anonymous:
            self.anonymous -= 1

    @property
    def has_no_clients(self) -> bool:
        """Whether no client has the connection, and no caller waits for it."""
        return not self.anonymous and not self.clients and not self.waiters

    @property
    def seems_unused(self) -> bool:
        """Whether nobody is known to have it.

        Whoever took a dedicated one without saying who it is may have forgotten it. If not, its
        next call opens a connection again.
        """
        return self.has_no_clients or (self.dedicated and not self.clients and not self.waiters)

    def statistics(self, now: float) -> dict[str, Any]:
        """The line of `get_stats()`."""
        return {
            "key": self.key,
            "address": self.address,
            "idle_time": max(0.0, now - self.last_used_at),
            "client_count": len(self.clients) + self.anonymous,
            "dedicated": self.dedicated,
            "generation": self.generation,
            "state": str(self.core.machine.state),
        }

    def __repr__(self) -> str:
        users = len(self.clients) + self.anonymous
        return (
            f"<ManagedConnection to {self.address}: {self.core.machine.state}, generation "
            f"{self.generation}, {users} clients{', dedicated' if self.dedicated else ''}>"
        )
