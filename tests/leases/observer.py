"""What an observer sees who knows nothing of leases but the logs of those who held them.

Each process appends to a file of its own what it believed and when, in nanoseconds of the monotonic
clock, which all processes of a machine share. The checks here are plain functions over these files.
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
    """That a process held a lease, from the answer on until it gave it back or its deadline."""

    start: int
    end: int
    id: str
    fence: int
    pid: int


class Excess(NamedTuple):
    """An instant at which more believed than may."""

    at: int
    holders: tuple[Belief, ...]


class Grant(NamedTuple):
    """Tokens of a rate limit that a process used at this instant."""

    at: int
    tokens: int


@dataclass(frozen=True)
class Window:
    """A stretch of time with more tokens than it may hold."""

    start: int
    end: int
    tokens: int
    allowed: float


def events(directory: Path) -> list[Event]:
    """All that was written, in the order of time; a line cut short by a kill was never written."""
    found: list[Event] = []
    for path in sorted(directory.glob("*.log")):
        *lines, _ = path.read_bytes().split(b"\n")
        found.extend(json.loads(line) for line in lines)
    return sorted(found, key=lambda event: int(event["at"]))


def counts(seen: Iterable[Event]) -> Counter[str]:
    """How often each thing happened."""
    return Counter(event["what"] for event in seen)


def beliefs(seen: Iterable[Event]) -> list[Belief]:
    """From when to when each lease was believed in.

    It begins when the answer was there and ends when the release was about to be sent, so whatever
    overlaps here is certain. Whoever was killed is taken to have believed until its last deadline,
    which is more than it did.
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
    """The first instant at which more than `limit` leases were believed in, if there is one."""
    return next(_crowded(believed, limit), None)


def peak(believed: Sequence[Belief]) -> int:
    """How many leases were believed in at most at any instant."""
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
    """The tokens that were used, in the order of time."""
    return sorted(Grant(int(e["at"]), e["tokens"]) for e in seen if e["what"] == "took")


def excess(used: Sequence[Grant], *, rate: float, burst: int) -> Window | None:
    """The window that holds more tokens than rate x window + burst, if there is one.

    A window that begins and ends with a use is the worst of all that hold the same uses. So with
    `debt` = tokens so far - rate x time, a window is over if the debt grew by more than the burst,
    less the first use, which is within the window too.
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
