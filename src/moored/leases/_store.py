"""The protocol of a store. Deadlines, renewals and outages are handled once, by the client.

The client chooses the ids of leases, so that an acquire that timed out can be undone: releasing an
id that was never granted has no effect. All times are the store's own; a client's clock decides
nothing here. Each method is atomic in the store, and raises only `StoreUnavailable` or
`StoreMisconfigured`.

The key and the id are enough to renew or release a lease; the other fields of the request are not
compared. A lease that expired or was released is never revived, even if the limit has room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Grant", "Held", "Holder", "Request", "Store", "Taken", "ended_once"]


@dataclass(frozen=True)
class Holder:
    """The holder of a lease; stored with it, for operators."""

    #: The name of the service.
    service_name: str
    #: The part of the service that holds the lease.
    owner: str
    host: str
    pid: int


@dataclass(frozen=True)
class Request:
    """A request for one lease, and its identity afterwards."""

    key: str
    #: Chosen by the client; globally unique, and never used again.
    id: str
    #: How many leases of this key may be live at once; 1 makes the lease exclusive.
    limit: int
    #: Seconds until the lease expires unless it is renewed.
    ttl: float
    holder: Holder


class Grant(NamedTuple):
    """A lease that the store granted."""

    id: str
    #: Greater than the fence of every earlier grant of this key when the limit is 1.
    fence: int


class Held(NamedTuple):
    """A live lease in the store."""

    key: str
    id: str
    fence: int
    holder: Holder
    #: Seconds since 1970, by the store's clock.
    created_at: float
    #: Seconds until the lease expires unless it is renewed.
    expires_in: float


class Taken(NamedTuple):
    """The result of taking tokens from a rate limit."""

    #: Tokens granted now.
    granted: int
    #: Seconds until the next token is free.
    wait: float


def ended_once(requests: Iterable[Request], ended: set[tuple[str, str]]) -> list[bool]:
    """Return whether each lease is in `ended`, as key and id; of one listed twice, only once."""
    left = set(ended)
    answers = []
    for request in requests:
        answers.append((request.key, request.id) in left)
        left.discard((request.key, request.id))
    return answers


class Store(Protocol):
    """The shared state of leases and rate limits, in a database or in memory."""

    async def open(self) -> None:
        """Connect, and create missing tables where that is allowed."""

    async def close(self) -> None:
        """Close the connections; leases stay as they are."""

    async def acquire(self, request: Request) -> Grant | None:
        """Grant a lease if fewer than the limit are live, else return None. Repeated with the same
        id while the lease is live, return the same grant."""

    async def renew(self, requests: Sequence[Request]) -> Sequence[bool]:
        """Extend leases to their ttl from now; False for each that is not live. Many leases take
        few round trips, or concurrent ones."""

    async def release(self, requests: Sequence[Request]) -> Sequence[bool]:
        """End leases; False for each that was not live; as `renew`, many at once."""

    async def take(self, key: str, *, rate: float, burst: int, tokens: int) -> Taken:
        """Take up to `tokens` from a limit of `rate` per second with this burst."""

    async def held(self, key: str | None = None) -> Sequence[Held]:
        """Return the live leases of one key, or of all keys."""
