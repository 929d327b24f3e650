"""The errors of the leases.

::

    MooredError
    └── LeaseError
        ├── StoreUnavailable    the store does not answer; the same call may work later
        ├── StoreMisconfigured  the store refuses the call; a retry does not help
        ├── LeaseLost           the lease expired, or the store no longer has it
        │   └── FenceRejected   the protected resource has seen a newer fence and refused a write
        └── LeaseRefused        no lease became free within the wait

A driver's errors are translated in the store's adapter, by one mapping.
"""

from __future__ import annotations

from typing import Literal

from moored.kernel import MooredError

#: Why a holder lost its lease.
LossReason = Literal["expired", "gone", "refused", "closed"]


class LeaseError(MooredError):
    """The base of all errors of leases and their stores."""


class StoreUnavailable(LeaseError):
    """The store did not answer in time, or reported that it cannot serve the call now."""


class StoreMisconfigured(LeaseError):
    """The store refused the call (URL, permissions, schema); a retry does not help."""


class LeaseLost(LeaseError):
    """A lease ended without being released by its holder.

    `reason` is "expired" (its deadline passed), "gone" (the store no longer has it), "refused" (it
    was local, and the store refused it after the outage) or "closed" (the client was closed).
    """

    def __init__(self, message: str, *, key: str = "", reason: LossReason = "gone") -> None:
        super().__init__(message)
        self.key = key
        self.reason = reason


class FenceRejected(LeaseLost):
    """A protected resource has seen a newer fence, and refused a write with an older one."""

    def __init__(self, resource: str, *, fence: int, seen: int) -> None:
        super().__init__(
            f"{resource!r} has been written with fence {seen}, so the write with fence {fence} was "
            "refused: another owner holds the lease now; stop the work under the old lease"
        )
        self.resource = resource
        #: The fence of the write that was refused.
        self.fence = fence
        #: The newest fence that the resource has seen.
        self.seen = seen


class LeaseRefused(LeaseError):
    """No lease became free within the wait."""
