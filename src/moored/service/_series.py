"""Which numbers of a part are drawn, and their values at each tick: rates of what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

from moored.kernel import describe
from moored.reservoir import BUCKETS

from ._history import MAX_SERIES
from ._part import System

__all__ = ["Reading", "Sampler", "Series", "quantile"]

log = logging.getLogger("moored.service")

#: The most counters of a component that are drawn.
MAX_COUNTERS = 8
#: Seconds for which a latency counts.
FRESH = 3.0
#: Parts up to which all their numbers are drawn, and not their main ones alone.
FEW = 60

SeriesKind = Literal["counter", "gauge", "latency"]


class Reading(NamedTuple):
    """One number of a system; the first one is its main number."""

    name: str
    title: str
    #: What was counted so far, if it is a counter.
    value: float | None
    kind: SeriesKind = "gauge"
    unit: str = ""
    limit: float | None = None


@dataclass(frozen=True)
class Series:
    """What is known of a series."""

    title: str
    unit: str
    kind: SeriesKind
    part: str
    limit: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return this as plain data."""
        return dict(self.__dict__)


def _count(name: str, title: str, value: float) -> Reading:
    return Reading(name, title, value, "counter", "/s")


def _pool(it: Mapping[str, Any]) -> Iterator[Reading]:
    yield Reading("in_use", "in use", it["in_use"], limit=it["max_size"])
    yield _count("checkouts", "checkouts", it["checkouts"])
    yield Reading("waiting", "callers waiting", it["waiting"])
    yield _count("opened", "connections opened", it["refills"])
    yield _count("failed", "checkouts failed", it["refused"] + it["timeouts"])


def _stream(it: Mapping[str, Any]) -> Iterator[Reading]:
    yield _count("changes", "transactions", it["transactions"])
    if (lag := it["lag"]) is not None:
        yield Reading("behind", "behind", lag["bytes"], unit="B")
    if (kept := it["slot"]["retained"]) is not None:
        yield Reading("kept", "log kept on the server", kept, unit="B")
    listener = it["listener"]
    age = None if listener is None else listener["heartbeat_age"]
    # An old one says nothing about now.
    if age is not None and age < FRESH and (seconds := listener["heartbeat_latency"]) is not None:
        yield Reading("answer", "answer of the server", seconds, "latency", "s")


def _broker(it: Mapping[str, Any]) -> Iterator[Reading]:
    yield _count("delivered", "events delivered", it["delivered"])
    yield Reading("streams", "streams", it["subscribers"])
    yield _count("events", "events", it["events"])
    yield _count("dropped", "events dropped", sum(it["dropped"].values()))


def _channel(it: Mapping[str, Any]) -> Iterator[Reading]:
    yield _count("calls", "calls", it["calls"])


def _sessions(it: Mapping[str, Any]) -> Iterator[Reading]:
    everyone = sum(it["states"].values())
    yield Reading("online", "online", it["states"].get("online", 0), limit=everyone)
    for name, counted, title in (
        ("sent", "acked", "messages sent"),
        ("received", "received", "messages received"),
        ("not_sent", "not_sent", "messages not sent"),
    ):
        yield _count(name, title, sum(each.get(counted, 0) for each in it["totals"].values()))


def _leases(it: Mapping[str, Any]) -> Iterator[Reading]:
    yield Reading("held", "leases held", it["held"])


def _consumer(it: Mapping[str, Any]) -> Iterator[Reading]:
    noun = "transactions" if "transactions" in it else "events"
    yield _count("handled", f"{noun} handled", it[noun])
    if "outstanding" in it:
        yield Reading("behind", "transactions to handle", it["outstanding"])
    if "parked" in it:
        yield Reading("parked", "parked", it["parked"])


def _component(it: Mapping[str, Any]) -> Iterator[Reading]:
    for name, value in list(it.get("counters", {}).items())[:MAX_COUNTERS]:
        yield _count(name, name.replace("_", " "), value)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Reading]]] = {
    "pool": _pool,
    "stream": _stream,
    "broker": _broker,
    "channel": _channel,
    "sessions": _sessions,
    "leases": _leases,
    "consumer": _consumer,
}


class Sampler:
    """Reads the numbers of all systems at each tick.

    :param systems: the running systems, by the path of the child that runs each.
    :param kinds: the kinds of the parts that are shown.
    """

    def __init__(self, systems: Mapping[str, System], kinds: Mapping[str, str]) -> None:
        self._systems = systems
        self._kinds = kinds
        self._few = len(kinds) <= FEW
        #: What is known of each series that was ever read.
        self.series: dict[str, Series] = {}
        #: How often what is known of them has changed.
        self.version = 0
        #: The series of the main number of each part.
        self.mains: dict[str, str] = {}
        #: The last sample.
        self.last: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._waits: dict[str, Sequence[int]] = {}
        self._at: float | None = None
        self._broken: set[str] = set()

    def sample(self, now: float) -> dict[str, float]:
        """Return the numbers of now: of a counter, its rate since the last sample."""
        passed, self._at = 0.0 if self._at is None else now - self._at, now
        values: dict[str, float] = {}
        counted: dict[str, float] = {}
        for path, system in list(self._systems.items()):
            part = path.split("/")[1]
            if part not in self._kinds:
                continue
            for reading in self._read(part, system, passed):
                name = f"{part}.{reading.name}"
                if not self._know(part, name, reading) or reading.value is None:
                    continue
                if reading.kind == "counter":
                    before = self._counted.get(name)
                    counted[name] = reading.value
                    # Less than before: the system has begun anew.
                    if before is None or passed <= 0 or reading.value < before:
                        continue
                    values[name] = _rounded((reading.value - before) / passed)
                else:
                    values[name] = _rounded(reading.value)
        self._counted, self.last = counted, values
        return values

    def _read(self, part: str, system: System, passed: float) -> list[Reading]:
        """Return the readings of a system; one that fails is a gap, and is logged once."""
        try:
            numbers = system.statistics()
            kind = self._kinds[part]
            found = list(_READERS.get(kind, _component)(numbers))
            if not self._few:
                found = found[:2]  # the main number, and the flow
            elif kind == "pool":
                found += self._latencies(part, numbers["latency"])
            # A counter of a user may be a Decimal, or NaN.
            return [each._replace(value=_finite(each.value)) for each in found]
        except Exception as error:
            if part not in self._broken:
                self._broken.add(part)
                log.warning("the numbers of %s cannot be read: %s", part, describe(error))
            return []

    def _latencies(self, part: str, counts: Sequence[int]) -> Iterator[Reading]:
        """Yield how long callers have waited since the last sample."""
        before = self._waits.get(part, (0,) * len(counts))
        self._waits[part] = counts
        new = [max(now - then, 0) for now, then in zip(counts, before, strict=True)]
        for name, title, share in (("wait_50", "wait", 0.5), ("wait_99", "wait, 99 %", 0.99)):
            yield Reading(name, title, quantile(new, share), "latency", "s")

    def _know(self, part: str, name: str, reading: Reading) -> bool:
        """Keep what is known of a series; return False if there are too many."""
        known = self.series.get(name)
        if known is None and len(self.series) >= MAX_SERIES:
            return False
        if known is None or known.limit != reading.limit:
            found = Series(reading.title, reading.unit, reading.kind, part, reading.limit)
            self.series[name] = found
            self.version += 1
            self.mains.setdefault(part, name)
        return True


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the wait that this share of callers did not exceed, from a histogram; None of none.

    It is interpolated within a bucket; what exceeds the last bound counts as that bound.
    """
    left = share * sum(counts)
    if not left:
        return None
    for place, count in enumerate(counts):
        if left <= count and place < len(BUCKETS):
            low = BUCKETS[place - 1] if place else 0.0
            return low + (BUCKETS[place] - low) * left / count
        left -= count
    return BUCKETS[-1]


def _finite(value: Any) -> float | None:
    number = None if value is None else float(value)
    return number if number is not None and isfinite(number) else None


def _rounded(value: float) -> float:
    """Return a number with four digits: a page shows no more, and unchanged ones are not sent."""
    return float(f"{value:.4g}")
