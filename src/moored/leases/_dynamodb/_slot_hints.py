"""The slots of this client's leases: hints that save reads, and may be wrong."""

from __future__ import annotations

from moored.kernel import Clock

from .._store import Request
from .._time_heap import TimeHeap

__all__ = ["SlotHints"]


class SlotHints:
    """The slot of each lease that this client requested, until the lease must have expired.

    A hint may be wrong: the slot may hold another lease now, or the request never reached DynamoDB.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[str, int] = {}
        self._ends = TimeHeap[str]()

    def note(self, request: Request, slot: int) -> None:
        """Record that the lease may be in this slot, for its ttl from now."""
        now = self._clock.monotonic()
        self._slots[request.id] = slot
        self._ends.set(request.id, now + 2 * request.ttl)
        for expired in self._ends.pop(now):
            del self._slots[expired]

    def forget(self, request: Request) -> None:
        """Remove the hint of a lease."""
        self._slots.pop(request.id, None)
        self._ends.drop(request.id)

    def of(self, request: Request) -> int | None:
        """Return the slot of a lease, or None if it is not known."""
        return self._slots.get(request.id)

    def __len__(self) -> int:
        return len(self._slots)
