"""Where the leases of this client are: a hint that saves reading, and that may be wrong."""

from __future__ import annotations

from moored.kernel import Clock

from .._store import Request

__all__ = ["SlotHints"]

#: How many hints there may be before those of leases that have ended are looked for.
_TIDY_AT = 1000


class SlotHints:
    """The slot of each lease that this client asked for, until it ends.

    A place is noted before the slot is written, so that it is known also when the answer is lost.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[int, float]] = {}
        self._tidy_at = _TIDY_AT

    def note(self, request: Request, slot: int) -> None:
        """The lease is, or may be, in this slot, for its ttl from now."""
        until = self._clock.monotonic() + 2 * request.ttl
        self._known[request.key, request.id] = slot, until
        if len(self._known) >= self._tidy_at:
            self._tidy()

    def forget(self, request: Request) -> None:
        """The lease is not there."""
        self._known.pop((request.key, request.id), None)

    def of(self, request: Request) -> int | None:
        """The slot of a lease, None where it is not known."""
        found = self._known.get((request.key, request.id))
        return None if found is None else found[0]

    def __len__(self) -> int:
        return len(self._known)

    def _tidy(self) -> None:
        now = self._clock.monotonic()
        self._known = {lease: place for lease, place in self._known.items() if place[1] > now}
        self._tidy_at = max(_TIDY_AT, 2 * len(self._known))
