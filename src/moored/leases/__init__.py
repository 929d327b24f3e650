"""Leases: rights that a whole cluster agrees on, without counters that drift.

A client keeps the leases of one process; a store is the place that the cluster agrees on::

    async with connect("redis://cache") as leases:
        async with leases.exclusive("nightly-report") as lease:
            await write_report(fence=lease.fence)

What always holds, whatever crashes, stalls or comes late:

- at most `limit` leases of a key are live at any instant, by every holder's own clock;
- a holder is told that its lease is over before the store could give it to another;
- a lease that is released is released once, and nobody else's with it;
- what a crashed process held is free after one ttl, and nobody has to repair anything;
- the fence of an exclusive lease is greater than every fence before it;
- a rate limit never gives more than rate·w + burst in any window of w seconds.

In an outage of the store the first and the last hold for each process alone, if that is what
`on_unavailable="local"` asks for; it is said loudly, and it ends by itself.
"""

from ._client import Leases, connect
from ._counts import LeaseStatistics
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
from ._store import Grant, Held, Holder, Request, Store, Taken

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # What users call
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
