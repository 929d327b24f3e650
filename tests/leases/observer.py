"""Checks of limits from the logs of the processes that held leases.

Each process appends its events to its own file, with times in nanoseconds of the monotonic clock,
which all processes of a machine share. The checks are plain functions over these files.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Belief",
    "Excess",
    "Grant",
    "Window",
    "beliefs",
    "counts",
    "events",
    "excess",
    "grants",
    "overfull",
    "peak",
]

SECOND = 1_000_000_000
Event = dict[str, Any]


class Belief(NamedTuple):
    """The time in which a process relied on a lease: from its grant to its release or deadline."""

    start: int
    end: int
    id: str
    fence: int
    pid: int


class Excess(NamedTuple):
    """An instant at which more leases were relied on than the limit allows."""

    at: int
    holders: tuple[Belief, ...]


class Grant(NamedTuple):
    """Tokens of a rate limit that a process used at this instant."""

    at: int
    tokens: int


@dataclass(frozen=True)
class Window:
    """A window with more tokens than the rate limit allows."""

    start: int
    end: int
    tokens: int
    allowed: float


def events(directory: Path) -> list[Event]:
    """Return all events in the order of time; a last line that a kill cut short is ignored."""
    found: list[Event] = []
    for path in sorted(directory.glob("*.log")):
        *lines, _ = path.read_bytes().split(b"\n")
        found.extend(json.loads(line) for line in lines)
    return sorted(found, key=lambda event: int(event["at"]))


def counts(seen: Iterable[Event]) -> Counter[str]:
    """Count the events by kind."""
    return Counter(event["what"] for event in seen)


def beliefs(seen: Iterable[Event]) -> list[Belief]:
    """Return from when to when each lease was relied on.

    That begins when the response had arrived and ends before the release is sent, so an overlap is
    certain. A killed process counts until its last deadline, which is longer than it lived.
    """
    leases: dict[str, list[Event]] = {}
    for event in seen:
        if "lease" in event:
            leases.setdefault(event["lease"], []).append(event)
    return sorted(belief for story in leases.values() for belief in _belief(story))


def _belief(story: list[Event]) -> Iterator[Belief]:
    first = story[0]
    assert first["what"] == "acquired", f"a lease out of nowhere: {story}"
    ends = [int(event["at"]) for event in story if event["what"] in ("released", "lost")]
    end = min([max(int(event["until"]) for event in story if "until" in event), *ends])
    if end > int(first["at"]):
        yield Belief(int(first["at"]), end, first["lease"], first["fence"], first["pid"])


def overfull(believed: Sequence[Belief], limit: int) -> Excess | None:
    """Return the first instant at which more than `limit` leases were relied on, or None."""
    return next(_crowded(believed, limit), None)


def peak(believed: Sequence[Belief]) -> int:
    """Return the largest number of leases that were relied on at one instant."""
    highest = 0
    while (found := overfull(believed, highest)) is not None:
        highest = max(highest + 1, len(found.holders))
    return highest


def _crowded(believed: Sequence[Belief], limit: int) -> Iterator[Excess]:
    live: list[tuple[int, Belief]] = []
    for belief in sorted(believed):
        while live and live[0][0] <= belief.start:
            heapq.heappop(live)
        heapq.heappush(live, (belief.end, belief))
        if len(live) > limit:
            yield Excess(belief.start, tuple(each for _, each in live))


def grants(seen: Iterable[Event]) -> list[Grant]:
    """Return the tokens that were used, in the order of time."""
    return sorted(Grant(int(e["at"]), e["tokens"]) for e in seen if e["what"] == "took")


def excess(used: Sequence[Grant], *, rate: float, burst: int) -> Window | None:
    """Return a window with more tokens than rate x window + burst, or None.

    Of all windows with the same uses, the shortest one begins and ends with a use. So with `debt` =
    tokens so far - rate x time, the limit is exceeded if the debt grew by more than the burst, less
    the first use, which is in the window, too.
    """
    if not used:
        return None
    origin, before, worst = used[0].at, 0, float("-inf")
    start, at_start = origin, 0
    for at, tokens in used:
        height = rate * (at - origin) / SECOND - before
        if height > worst:
            worst, start, at_start = height, at, before
        before += tokens
        allowed = rate * (at - start) / SECOND + burst
        if before - at_start > allowed + 1e-6:
            return Window(start, at, before - at_start, allowed)
    return None
