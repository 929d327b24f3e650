"""Recent sends, for peers that request one again.

The cache is created with the connection and discarded with it: an entry that crashed a connection
must not crash the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from moored.kernel import Clock, refuse, unmet

from .._protocol import Outgoing

__all__ = ["MemoryRetryCache", "RetryCache"]


class RetryCache(ABC):
    """Recent sends, by id."""

    @abstractmethod
    def put(self, id: str, outgoing: Outgoing) -> None:
        """Keep a send that was just written; it replaces one with the same id."""

    @abstractmethod
    def get(self, id: str) -> Outgoing | None:
        """Return the send, or None if it is no longer kept."""


class MemoryRetryCache(RetryCache):
    """The newest `size` sends of the last `seconds`, in memory.

    The oldest send is evicted first, also if a peer requests it again and again.

    :param now: the clock; that of the event loop by default.
    """

    __slots__ = ("_entries", "_now", "evicted", "expired", "seconds", "size")

    def __init__(
        self, size: int = 512, seconds: float = 300.0, *, now: Callable[[], float] | None = None
    ) -> None:
        checks = (
            ("size", size, size >= 1, "at least 1"),
            ("seconds", seconds, seconds > 0, "more than 0"),
        )
        refuse("MemoryRetryCache", unmet(*checks))
        self.size = size
        self.seconds = seconds
        #: The number of sends removed because the cache was full, and because they were too old.
        self.evicted = self.expired = 0
        self._now = Clock.current().monotonic if now is None else now
        self._entries: OrderedDict[str, tuple[float, Outgoing]] = OrderedDict()

    def put(self, id: str, outgoing: Outgoing) -> None:
        """Keep a send as the newest; it replaces one with the same id."""
        self.expire()
        self._entries.pop(id, None)
        self._entries[id] = (self._now() + self.seconds, outgoing)
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
            self.evicted += 1

    def get(self, id: str) -> Outgoing | None:
        """Return the send, or None if it is no longer kept."""
        self.expire()
        _, outgoing = self._entries.get(id, (0.0, None))
        return outgoing

    def expire(self) -> None:
        """Remove the sends that are too old."""
        entries = self._entries
        now = self._now()
        while entries and next(iter(entries.values()))[0] <= now:
            entries.popitem(last=False)
            self.expired += 1

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<MemoryRetryCache: {len(self)} of {self.size}, {self.evicted} evicted, "
            f"{self.expired} expired>"
        )
