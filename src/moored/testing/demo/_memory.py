"""What a session over the demo protocol remembers between two links."""

from __future__ import annotations

__all__ = ["DemoMemory"]

#: How many unconfirmed sends are kept for a resumption.
_MOST_KEPT = 10_000


class DemoMemory:
    """What outlives a link: the name of what can be resumed, and what is unconfirmed."""

    __slots__ = ("token", "unconfirmed")

    def __init__(self) -> None:
        self.token: str | None = None
        self.unconfirmed: dict[str, bytes] = {}

    def written(self, id: str, data: bytes) -> None:
        """It may have to be written again."""
        self.unconfirmed.pop(id, None)
        self.unconfirmed[id] = data
        if len(self.unconfirmed) > _MOST_KEPT:
            del self.unconfirmed[next(iter(self.unconfirmed))]

    def settled(self, id: str) -> None:
        """The server has said what became of it."""
        self.unconfirmed.pop(id, None)
