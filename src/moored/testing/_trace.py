"""The events of one schedule, with their virtual times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Trace", "TraceEvent"]


class TraceEvent(NamedTuple):
    """One event: its virtual time, the task, host or connection, and a description."""

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:12.6f}  {self.who:<24} {self.what}"


class Trace:
    """The newest events of one schedule; `total` also counts the dropped older ones."""

    def __init__(self, size: int = 400) -> None:
        self.total = 0
        self._events: deque[TraceEvent] = deque(maxlen=size)

    def add(self, at: float, who: str, what: str) -> None:
        """Append an event; drop the oldest if the trace is full."""
        self.total += 1
        self._events.append(TraceEvent(at, who, what))

    def text(self, newest: int = 40) -> str:
        """Return the newest events as lines, in order of time."""
        return "\n".join(map(str, list(self._events)[-newest:]))

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def __repr__(self) -> str:
        return f"<Trace of {self.total} events, {len(self)} kept>"
