"""Recent sends, to answer a peer that asks for one again.

It is made with the session, before anything can ask, and is gone with it: an entry that made the
session crash must not be met by the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from moored.kernel import Clock, refuse

from .._protocol import Outgoing

__all__ = ["MemoryRetryCache", "RetryCache"]


class RetryCache(ABC):
    """Recent sends, by id."""

    @abstractmethod
    def put(self, id: str, outgoing: Outgoing) -> None:
        """Keep a send that was written just now; one of the same id is replaced."""

    @abstractmethod
    def get(self, id: str) -> Outgoing | None:
        """The send, if it is still kept."""


class MemoryRetryCache(RetryCache):
    """The newest `size` sends of the last `seconds`, in memory.

    What was put first goes first: a peer that asks for one thing over and over keeps nothing else
    away. `now` is the clock.
    """

    __slots__ = ("_entries", "_now", "evicted", "expired", "hits", "misses", "seconds", "size")

    def __init__(
        self,
        size: int = 512,
        seconds: float = 300.0,
        *,
        now: Callable[[], float] | None = None,
    ) -> None:
        mistakes = [] if size >= 1 else [f"size={size!r} must be at least 1"]
        mistakes += [] if seconds > 0 else [f"seconds={seconds!r} must be more than 0"]
        refuse("MemoryRetryCache", mistakes)
        self.size = size
        self.seconds = seconds
        #: Sends let go for lack of room, and because their time was over.
        self.evicted = self.expired = 0
        #: Questions that were answered, and those that were not.
        self.hits = self.misses = 0
        self._now = Clock.current().monotonic if now is None else now
        self._entries: OrderedDict[str, tuple[float, Outgoing]] = OrderedDict()

    def put(self, id: str, outgoing: Outgoing) -> None:
        """Keep a send; one of the same id is replaced, and counts as the newest."""
        self.expire()
        self._entries.pop(id, None)
        self._entries[id] = (self._now() + self.seconds, outgoing)
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
            self.evicted += 1

    def get(self, id: str) -> Outgoing | None:
        """The send, if it is still kept."""
        self.expire()
        entry = self._entries.get(id)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return entry[1]

    def expire(self) -> None:
        """Let go of what is too old."""
        entries = self._entries
        now = self._now()
        while entries and next(iter(entries.values()))[0] <= now:
            entries.popitem(last=False)
            self.expired += 1

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"<MemoryRetryCache: {len(self)} of {self.size}, {self.evicted} evicted, "
            f"{self.expired} expired>"
        )
