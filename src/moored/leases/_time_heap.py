"""Times of many things, the earliest first: what lets one timer serve them all."""

from __future__ import annotations

import heapq
import math

__all__ = ["TimeHeap"]

# Old times stay in the heap until they come up; past this many for each one in use it is rebuilt.
_STALE_PER_USED = 2
_ROOM = 64


class TimeHeap:
    """One time for each name; a new one replaces the old. Infinity is never, and costs nothing."""

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, name: str, when: float) -> None:
        """Note when it is this one's time."""
        if when == math.inf:
            self.drop(name)
        elif self._times.get(name) != when:
            self._times[name] = when
            heapq.heappush(self._heap, (when, name))
            if len(self._heap) > _STALE_PER_USED * len(self._times) + _ROOM:
                self._heap = [(when, name) for name, when in self._times.items()]
                heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Forget it; harmless when there is nothing to forget."""
        self._times.pop(name, None)

    def get(self, name: str) -> float:
        """Its time, or infinity."""
        return self._times.get(name, math.inf)

    def first(self) -> float:
        """The earliest time, or infinity."""
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop(self, until: float) -> list[str]:
        """Take out every name whose time comes by then, the earliest first."""
        found = []
        while self.first() <= until and self._heap:
            _, name = heapq.heappop(self._heap)
            del self._times[name]
            found.append(name)
        return found

    def __len__(self) -> int:
        return len(self._times)
