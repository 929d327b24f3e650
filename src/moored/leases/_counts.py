"""The counters of a client."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["Counts", "LeaseStatistics"]


class LeaseStatistics(NamedTuple):
    """The state of a client, and its counters since it was created."""

    #: Leases held now, local ones included.
    held: int
    #: Local leases held now: granted by this process while the store was unavailable.
    local: int
    #: Leases in doubt: the store may hold them, and no caller does; they are being released.
    in_doubt: int
    #: Whether the store answered the last call.
    available: bool
    #: Leases granted by the store.
    acquired: int
    #: Acquires refused because the limit was reached.
    refused: int
    #: Leases released by their holders.
    released: int
    #: Renewals, each counted per lease.
    renewed: int
    #: Leases lost because their deadline passed.
    lost_expired: int
    #: Leases lost because the store no longer had them.
    lost_gone: int
    #: Local leases lost because the store refused them after the outage.
    lost_refused: int
    #: Leases lost because the client was closed.
    lost_closed: int
    #: Leases granted or kept by this process in an outage.
    local_granted: int
    #: Acquires refused in an outage because the local limit was reached.
    local_refused: int
    #: Local leases that the store granted after the outage.
    exchanged: int
    #: Leases in doubt that the store held, and released.
    undone: int
    #: Leases in doubt that were never settled, and must have expired in the store.
    left_to_time: int
    #: Tokens of rate limits that were used.
    tokens: int
    #: Tokens that were not used within their hold time.
    tokens_stale: int
    #: Tokens that were used in an outage, by the limit of this process.
    tokens_local: int
    #: Calls sent to the store.
    store_calls: int
    #: Calls that failed or timed out.
    store_failures: int
    #: Outages of the store.
    outages: int
    #: `on_lost` callbacks that raised.
    callback_errors: int


@dataclass
class Counts:
    """The counters of `LeaseStatistics`, which documents them."""

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
        """Return the counters together with the current state."""
        return LeaseStatistics(held, local, in_doubt, available, **asdict(self))
