"""Leases: cluster-wide limits, exclusive locks with fencing, and rate limits.

A client acquires and renews the leases of one process. The store (Postgres, Redis, DynamoDB or
memory) is shared by all processes and decides which leases are granted::

    async with connect("redis://cache") as leases:
        async with leases.exclusive("nightly-report") as lease:
            await write_report(fence=lease.fence)

Invariants, also when processes crash or stall and messages are late:

- at most `limit` leases of a key are live at any instant, by every holder's own clock;
- a holder is notified that its lease has expired before the store can grant it to another holder;
- a release ends exactly one lease, and ends it once;
- the leases of a crashed process are free after one ttl, without any repair;
- the fence of an exclusive lease is greater than every earlier fence of its key;
- a rate limit never grants more than rate·w + burst tokens in any window of w seconds.

With `on_unavailable="local"`, the first and the last hold only within each process while the store
is unavailable. The start and the end of such an outage are logged.
"""

from ._client import Leases, connect
from ._errors import (
    FenceRejected,
    LeaseError,
    LeaseLost,
    LeaseRefused,
    StoreMisconfigured,
    StoreUnavailable,
)
from ._exclusive import Exclusive
from ._lease import Lease
from ._memory import MemoryStore
from ._policy import Policy
from ._rate import RateLimit
from ._statistics import LeaseStatistics
from ._store import Grant, Held, Holder, Request, Store, Taken

__all__ = [  # noqa: RUF022 (grouped by purpose)
    # Client
    "Exclusive",
    "Lease",
    "LeaseStatistics",
    "Leases",
    "Policy",
    "RateLimit",
    "connect",
    # Stores
    "Grant",
    "Held",
    "Holder",
    "MemoryStore",
    "Request",
    "Store",
    "Taken",
    # Errors
    "FenceRejected",
    "LeaseError",
    "LeaseLost",
    "LeaseRefused",
    "StoreMisconfigured",
    "StoreUnavailable",
]
