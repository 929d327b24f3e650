"""The state and the counters of a client."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LeaseStatistics"]


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
    acquired: int = 0
    #: Acquires refused because the limit was reached.
    refused: int = 0
    #: Leases released by their holders.
    released: int = 0
    #: Renewals, each counted per lease.
    renewed: int = 0
    #: Leases lost because their deadline passed.
    lost_expired: int = 0
    #: Leases lost because the store no longer had them.
    lost_gone: int = 0
    #: Local leases lost because the store refused them after the outage.
    lost_refused: int = 0
    #: Leases lost because the client was closed.
    lost_closed: int = 0
    #: Leases granted or kept by this process in an outage.
    local_granted: int = 0
    #: Acquires refused in an outage because the local limit was reached.
    local_refused: int = 0
    #: Local leases that the store granted after the outage.
    exchanged: int = 0
    #: Leases in doubt that the store held, and released.
    undone: int = 0
    #: Leases in doubt that were never settled, and must have expired in the store.
    left_to_time: int = 0
    #: Tokens of rate limits that were used.
    tokens: int = 0
    #: Tokens that were not used within their hold time.
    tokens_stale: int = 0
    #: Tokens that were used in an outage, by the limit of this process.
    tokens_local: int = 0
    #: Calls sent to the store.
    store_calls: int = 0
    #: Calls that failed or timed out.
    store_failures: int = 0
    #: Outages of the store.
    outages: int = 0
    #: `on_lost` callbacks that raised.
    callback_errors: int = 0
