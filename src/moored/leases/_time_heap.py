"""A heap of named times, so that one timer can serve many leases."""

from __future__ import annotations

import heapq
import math
from typing import Any, Generic, TypeVar

__all__ = ["TimeHeap"]

# Replaced times stay in the heap until they reach its top. The heap is rebuilt when it holds more
# than this many entries for each name, plus a constant.
_ENTRIES_PER_NAME = 2
_SPARE_ENTRIES = 64


#: A string, or a tuple of strings: names with equal times are compared.
N = TypeVar("N", bound=Any)


class TimeHeap(Generic[N]):
    """One time for each name, earliest first. Setting a name to infinity removes it."""

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[N, float] = {}
        self._heap: list[tuple[float, N]] = []

    def set(self, name: N, when: float) -> None:
        """Set or replace the time of a name."""
        if when == math.inf:
            self.drop(name)
        elif self._times.get(name) != when:
            self._times[name] = when
            heapq.heappush(self._heap, (when, name))
            if len(self._heap) > _ENTRIES_PER_NAME * len(self._times) + _SPARE_ENTRIES:
                self._heap = [(when, name) for name, when in self._times.items()]
                heapq.heapify(self._heap)

    def drop(self, name: N) -> None:
        """Remove a name; unknown names are ignored."""
        self._times.pop(name, None)

    def get(self, name: N) -> float:
        """Return the time of a name, or infinity if it has none."""
        return self._times.get(name, math.inf)

    def first(self) -> float:
        """Return the earliest time, or infinity if there is none."""
        heap = self._heap
        while heap and self._times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop(self, until: float) -> list[N]:
        """Remove and return the names whose time is at most `until`, earliest first."""
        found = []
        while self.first() <= until and self._heap:
            _, name = heapq.heappop(self._heap)
            del self._times[name]
            found.append(name)
        return found

    def __len__(self) -> int:
        return len(self._times)
