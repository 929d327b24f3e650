"""The event counters of a session."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SessionCounts"]


@dataclass(slots=True, eq=False)
class SessionCounts:
    """The event counters of one session, as in `status()`."""

    acked: int = 0
    rejected: int = 0
    not_sent: int = 0
    unknown: int = 0
    received: int = 0
    unhandled: int = 0
    stale: int = 0
    crashes: int = 0
    repeated: int = 0
    not_repeated: int = 0
    bounced: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name; `dataclasses.asdict` takes ten times as long."""
        return {name: getattr(self, name) for name in self.__slots__}
