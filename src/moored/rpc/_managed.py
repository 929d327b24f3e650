"""One connection of a manager: its handler, its address, and its clients."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

from ._clients import Clients
from ._config import ConnectionConfig
from ._core import CHART, Actions, ConnectionCore

__all__ = ["ManagedConnection"]

H = TypeVar("H")

#: States in which a connection can be handed out at once (see `ConnectionCore.usable`).
_USABLE = tuple(each for each in CHART.states if CHART.at(each, "serving", "renewing"))


@dataclass(eq=False, repr=False)
class ManagedConnection(Generic[H]):
    """A connection in the table of a manager.

    The handler stays the same for the whole life of the connection; the channel in it is replaced.
    """

    handler: H
    config: ConnectionConfig
    strategy: Any
    core: ConnectionCore
    _: KW_ONLY
    #: The key in the table; that of a dedicated connection has a number in it.
    key: str
    dedicated: bool
    connect_timeout: float
    #: When it was created, by the manager's clock, as is `last_used_at`.
    created_at: float = 0.0
    #: The address of the current channel.
    address: str = ""
    #: The clients that were named with `client=`, held weakly.
    clients: Clients[object] = field(default_factory=Clients)
    #: The number of unnamed clients. A surplus `release()` by one of them is counted for another
    #: one, whose next call then reopens the connection: see `ConnectionTable.detach`.
    anonymous: int = 0
    #: Since when it has no clients.
    unused_since: float | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    #: The current, or the last, attempt to connect.
    dial: asyncio.Task[None] | None = None
    #: Multiplies the interval between pings after the server has received too many.
    ping_factor: int = 1
    #: The generation in which unsent calls were last recorded: once for each outage.
    unsent_in: int = -1

    def __post_init__(self) -> None:
        self.address = self.config.address

    @property
    def generation(self) -> int:
        """The number of the current channel; it grows with each replacement."""
        return self.core.generation

    @property
    def trouble(self) -> str:
        """Why the current attempt makes no progress; "" if that is not known."""
        return str(getattr(self.strategy, "trouble", ""))

    @property
    def last_used_at(self) -> float:
        """When the connection was last handed out, or last used for a call."""
        return max(self.core.last_used_at, self.called_at)

    @property
    def called_at(self) -> float:
        """When the last call was made."""
        return getattr(self.handler, "_used_at", 0.0)

    def hand_out(self, client: object | None, now: float) -> bool:
        """Hand the connection out, if it is connected and was used recently; return whether.

        Nearly every checkout takes this path, so it is written out, with each lookup made once. Any
        thread may call it, without a lock: if the connection is closed meanwhile, a call over the
        handler opens it again; and with a GIL, which gRPC needs, an increment is one step.
        """
        core = self.core
        if core.machine.state not in _USABLE:
            return False
        # The cheap comparison first: the times of calls are read from the handler.
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
        """A caller requests the connection: see `ConnectionCore.requested`."""
        self.core.last_used_at = self.last_used_at  # with the times of calls
        return self.core.requested(now)

    def taken(self, client: object | None) -> None:
        """Add a client."""
        self.unused_since = None
        if client is None:
            self.anonymous += 1
        else:
            self.clients.add(client)

    def given_back(self, client: object | None) -> None:
        """Remove a client; a surplus call is harmless."""
        if client is not None:
            self.clients.discard(client)
        elif self.anonymous:
            self.anonymous -= 1

    def is_last(self, client: object | None) -> bool:
        """Whether the connection is dedicated, and is closed when this client releases it."""
        others = [each for each in self.clients if each is not client]
        return self.dedicated and not others and self.anonymous <= (client is None)

    @property
    def has_no_clients(self) -> bool:
        """Whether the connection has no clients and no waiting callers."""
        return not self.anonymous and not self.clients and not self.waiters

    @property
    def seems_unused(self) -> bool:
        """Whether the connection has no clients that are known to exist.

        An unnamed client of a dedicated connection may have dropped it without a `release()`. If
        not, its next call opens a connection again.
        """
        return self.has_no_clients or (self.dedicated and not self.clients and not self.waiters)

    def statistics(self, now: float) -> dict[str, Any]:
        """Return the entry of this connection in `get_stats()`."""
        return {
            "key": self.key,
            "address": self.address,
            "age": max(0.0, now - self.created_at),
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
