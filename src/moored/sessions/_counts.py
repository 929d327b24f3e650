"""The event counters of a session."""

from __future__ import annotations

__all__ = ["SessionCounts"]


class SessionCounts:
    """The event counters of one session, as in `status()`."""

    __slots__ = (
        "acked",
        "bounced",
        "crashes",
        "not_repeated",
        "not_sent",
        "received",
        "rejected",
        "repeated",
        "stale",
        "unhandled",
        "unknown",
    )

    def __init__(self) -> None:
        self.acked = self.rejected = self.not_sent = self.unknown = 0
        self.received = self.unhandled = self.stale = self.crashes = 0
        self.repeated = self.not_repeated = self.bounced = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}
