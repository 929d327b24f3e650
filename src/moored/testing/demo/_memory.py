"""The state that a session over the demo protocol keeps between two links."""

from __future__ import annotations

__all__ = ["DemoMemory"]

#: The most unconfirmed sends that are kept for a resumption.
_MOST_KEPT = 10_000


class DemoMemory:
    """The token for resuming the last link, and its unconfirmed sends."""

    __slots__ = ("token", "unconfirmed")

    def __init__(self) -> None:
        self.token: str | None = None
        self.unconfirmed: dict[str, bytes] = {}

    def written(self, id: str, data: bytes) -> None:
        """Keep a send that may have to be written again."""
        self.unconfirmed.pop(id, None)
        self.unconfirmed[id] = data
        if len(self.unconfirmed) > _MOST_KEPT:
            del self.unconfirmed[next(iter(self.unconfirmed))]

    def settled(self, id: str) -> None:
        """Drop a send that was confirmed or refused."""
        self.unconfirmed.pop(id, None)
