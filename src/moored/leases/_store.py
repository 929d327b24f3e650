"""What a store must do. Everything else (deadlines, renewals, outages) is done once, above it.

A store is asked with ids that the caller made, so that a call whose answer was lost can be undone:
releasing an id that was never granted is harmless. All times are the store's own; a caller's clock
decides nothing here. Each method is atomic in the store, and raises `StoreUnavailable` or
`StoreMisconfigured` and nothing else.

A lease is renewed and released by its key and id alone: an operator who ends one knows no more.
What has ended, by time or by release, is never revived, whether or not there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Grant", "Held", "Holder", "Request", "Store", "Taken"]


@dataclass(frozen=True)
class Holder:
    """Who holds a lease; stored with it, for people."""

    #: What the service is called.
    service_name: str
    #: The part of it that holds the lease.
    owner: str
    host: str
    pid: int


@dataclass(frozen=True)
class Request:
    """One lease, as it is asked for: the id is the caller's, unique for ever."""

    key: str
    id: str
    #: How many leases of this key may live at once; 1 makes it exclusive.
    limit: int
    #: For how many seconds it lives unless it is renewed.
    ttl: float
    holder: Holder


class Grant(NamedTuple):
    """A lease that was given."""

    id: str
    #: Greater than the fence of every earlier grant of this key when the limit is 1.
    fence: int


class Held(NamedTuple):
    """A live lease, as the store sees it."""

    key: str
    id: str
    fence: int
    holder: Holder
    #: Seconds since 1970, by the store's clock.
    created_at: float
    #: Seconds until it ends unless it is renewed.
    expires_in: float


class Taken(NamedTuple):
    """What a rate limit gave: so many tokens now, and how long until the next one is free."""

    granted: int
    wait: float


class Store(Protocol):
    """A place that a whole cluster agrees on."""

    async def open(self) -> None:
        """Connect, and make the layout where that is allowed."""

    async def close(self) -> None:
        """Let go of the connections; leases stay as they are."""

    async def acquire(self, request: Request) -> Grant | None:
        """Give a lease if fewer than the limit live, else None. Asking again with the same id
        gives the same lease again, while it lives."""

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases by their ttl from now; False for each that does not live any more, or
        lives with another holder's id. In few round trips, however many there are."""

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that did not live. In few round trips."""

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with at most `burst` at once."""

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """The live leases, of one key or of all."""
