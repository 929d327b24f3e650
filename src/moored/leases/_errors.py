"""The errors of the leases.

::

    MooredError
    └── LeaseError
        ├── StoreUnavailable    the store does not answer; it may again
        ├── StoreMisconfigured  the store answers, and says that it cannot be used like this
        ├── LeaseLost           the right is gone: the store gave it away, or its time is over
        │   └── FenceRejected   the protected resource has seen a newer owner, and refused a write
        └── LeaseRefused        all leases are taken, and stay so for the time given

A store's own errors are translated in its adapter, with one mapping, and nowhere else.
"""

from __future__ import annotations

from typing import Literal

from moored.kernel import MooredError

__all__ = [
    "FenceRejected",
    "LeaseError",
    "LeaseLost",
    "LeaseRefused",
    "LossReason",
    "StoreMisconfigured",
    "StoreUnavailable",
]

#: Why a holder lost its lease.
LossReason = Literal["expired", "gone", "refused", "closed"]


class LeaseError(MooredError):
    """Something about a lease or its store."""


class StoreUnavailable(LeaseError):
    """The store did not answer, or not in time; the same call may work later."""


class StoreMisconfigured(LeaseError):
    """The store answered that it cannot be used like this; trying again does not help."""


class LeaseLost(LeaseError):
    """The right is gone: the store gave it away, or its time is over.

    `reason` is "expired" (its deadline passed), "gone" (the store does not know it any more),
    "refused" (it was local, and the store has no room for it) or "closed" (the client was).
    """

    def __init__(self, message: str, *, key: str = "", reason: LossReason = "gone") -> None:
        super().__init__(message)
        self.key = key
        self.reason = reason


class FenceRejected(LeaseLost):
    """A protected resource has seen a newer fence, so it refused a write with this one."""

    def __init__(self, resource: str, *, fence: int, seen: int) -> None:
        super().__init__(
            f"{resource!r} has been written with fence {seen}, so the write with fence {fence} was "
            "refused: another owner has the lease now; stop what was done under the old one"
        )
        self.resource = resource
        #: The fence of the write that was refused.
        self.fence = fence
        #: The newest fence that the resource has seen.
        self.seen = seen


class LeaseRefused(LeaseError):
    """No lease could be had within the time given."""
