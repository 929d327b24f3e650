"""The slots of this client's leases: hints that save reads, and may be wrong."""

from __future__ import annotations

from moored.kernel import Clock

from .._store import Request

__all__ = ["SlotHints"]

#: Hints of expired leases are removed when there are this many hints, or more.
_TIDY_AT = 1000


class SlotHints:
    """The slot of each lease that this client requested, until the lease must have expired.

    A hint is added before the slot is written, so that it exists even if the response is lost.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[int, float]] = {}
        self._tidy_at = _TIDY_AT

    def note(self, request: Request, slot: int) -> None:
        """Record that the lease may be in this slot, for its ttl from now."""
        until = self._clock.monotonic() + 2 * request.ttl
        self._known[request.key, request.id] = slot, until
        if len(self._known) >= self._tidy_at:
            self._tidy()

    def forget(self, request: Request) -> None:
        """Remove the hint of a lease."""
        self._known.pop((request.key, request.id), None)

    def of(self, request: Request) -> int | None:
        """Return the slot of a lease, or None if it is not known."""
        found = self._known.get((request.key, request.id))
        return None if found is None else found[0]

    def __len__(self) -> int:
        return len(self._known)

    def _tidy(self) -> None:
        now = self._clock.monotonic()
        self._known = {lease: hint for lease, hint in self._known.items() if hint[1] > now}
        self._tidy_at = max(_TIDY_AT, 2 * len(self._known))
