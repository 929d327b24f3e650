"""What a client has done so far, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["Counts", "LeaseStatistics"]


class LeaseStatistics(NamedTuple):
    """A client in numbers: what it holds now, and what happened since it was made."""

    #: Leases held now, local ones among them.
    held: int
    #: Leases held now that this process gave itself, because the store could not be asked.
    local: int
    #: Leases that the store may have and nobody here wants; they are given back, or end there.
    in_doubt: int
    #: Whether the store answered the last call.
    available: bool
    #: Leases that the store gave.
    acquired: int
    #: Times that there was no room.
    refused: int
    #: Leases that were given back by their holders.
    released: int
    #: Leases extended, each time counted.
    renewed: int
    #: Holders told that their lease is over, because its deadline passed,
    lost_expired: int
    #: … because the store did not know it any more,
    lost_gone: int
    #: … because it was local and the store had no room for it,
    lost_refused: int
    #: … because the client was closed.
    lost_closed: int
    #: Leases that this process gave itself in an outage.
    local_granted: int
    #: Times that the local limit was reached in an outage.
    local_refused: int
    #: Local leases that became real when the store was back.
    exchanged: int
    #: Leases whose fate was unknown and that the store was then found to have, and gave back.
    undone: int
    #: Leases whose fate stayed unknown until they must have ended by themselves.
    left_to_time: int
    #: Tokens of rate limits that were used.
    tokens: int
    #: Tokens that came too late, or lay too long, to be used.
    tokens_stale: int
    #: Tokens used that this process gave itself in an outage.
    tokens_local: int
    #: Calls made to the store.
    store_calls: int
    #: Calls that were not answered, or not in time.
    store_failures: int
    #: Times that the store stopped answering.
    outages: int
    #: Callbacks of holders that raised.
    callback_errors: int


@dataclass
class Counts:
    """The counters behind `LeaseStatistics`, which explains them."""

    acquired: int = 0
    refused: int = 0
    released: int = 0
    renewed: int = 0
    lost_expired: int = 0
    lost_gone: int = 0
    lost_refused: int = 0
    lost_closed: int = 0
    local_granted: int = 0
    local_refused: int = 0
    exchanged: int = 0
    undone: int = 0
    left_to_time: int = 0
    tokens: int = 0
    tokens_stale: int = 0
    tokens_local: int = 0
    store_calls: int = 0
    store_failures: int = 0
    outages: int = 0
    callback_errors: int = 0

    def snapshot(self, *, held: int, local: int, in_doubt: int, available: bool) -> LeaseStatistics:
        """The counters with the state of this moment."""
        return LeaseStatistics(held, local, in_doubt, available, **asdict(self))
