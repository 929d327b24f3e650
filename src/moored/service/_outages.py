"""The last incidents: which parts did not work, when, for how long, why, and what it cost.

An incident begins when a part stops working, and ends when all parts work again. It is kept after
the recovery.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moored.kernel import Clock, Event, Recorder, duration

from ._health import WORKING, Status, worst
from ._part import cost_words

__all__ = ["PartOutages"]

#: Incidents that are kept.
KEPT = 20
#: Seconds before an incident in which the failure that caused it may have been recorded.
BEFORE = 1.0
#: Causes shown for one incident.
MAX_CAUSES = 3


@dataclass
class _Outage:
    """The time in which one part did not work."""

    at: float
    wall: float
    detail: str
    #: The worst health in this time.
    state: Status
    lasted: float | None = None
    #: Set at the end of the incident: the recorder drops old events.
    causes: list[str] = field(default_factory=list)


@dataclass
class _Incident:
    costs_before: Counter[str]
    outages: dict[str, _Outage] = field(default_factory=dict)
    #: Set at the end.
    costs: dict[str, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return all(each.lasted is not None for each in self.outages.values())

    @property
    def first(self) -> _Outage:
        return min(self.outages.values(), key=lambda each: each.at)

    @property
    def lasted(self) -> float | None:
        ends = [each.at + each.lasted for each in self.outages.values() if each.lasted is not None]
        return max(ends) - self.first.at if self.over else None


class PartOutages:
    """The last incidents, and in each the parts that were not active.

    :param order: returns the components in the order in which they are started. A component starts
        after those that it depends on, so a failure of an earlier one is more likely the cause.
    :param costs: returns what failures have cost callers so far, by name.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        order: Callable[[], Mapping[str, int]] = dict,
        costs: Callable[[], Counter[str]] = Counter,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._order = order
        self._costs = costs
        self._incidents: deque[_Incident] = deque(maxlen=KEPT)
        #: The parts that have not worked yet: no other part stops working because of them.
        self._starting: set[str] = set()
        # Costs arise before an incident is noticed, so an earlier count is compared.
        self._counted: deque[tuple[float, Counter[str]]] = deque(maxlen=2)

    def report(self, part: str, before: Status, state: Status, detail: str) -> None:
        """Take the health of a part, which begins, continues or ends an incident."""
        now, incident = self._clock.monotonic(), self._open()
        outage = incident and incident.outages.get(part)
        if state in WORKING:
            self._starting.discard(part)
            if incident and outage and outage.lasted is None:
                outage.lasted = now - outage.at
                self._conclude(incident)
            elif incident is None:
                self._count(now)
        elif outage:
            outage.state, outage.lasted = worst((outage.state, state)), None
        elif before in WORKING and (before, state) != ("waiting", "starting"):  # not a take-over
            if incident is None:
                incident = _Incident(self._counted[0][1] if self._counted else self._costs())
                self._incidents.append(incident)
            incident.outages[part] = _Outage(now, self._clock.wall(), detail, state)
        else:
            self._starting.add(part)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the incidents as plain data, the newest first."""
        return [
            {
                "parts": {part: each.state for part, each in incident.outages.items()},
                "lasted_of": {part: each.lasted for part, each in incident.outages.items()},
                "wall": incident.first.wall,
                "lasted": incident.lasted,
                "because": self._all_causes(incident),
                "cost": self._cost(incident),
            }
            for incident in reversed(self._incidents)
        ]

    def lines(self, part: str) -> Iterator[str]:
        """Yield the last outage of a part as lines of an explanation."""
        incident = next((each for each in reversed(self._incidents) if part in each.outages), None)
        if incident is None:
            return
        outage = incident.outages[part]
        if outage.lasted is None:
            now = self._clock.monotonic() - outage.at
            yield f"  before   {part} worked until {_time(outage.wall)}, {duration(now)} ago"
        else:
            end = _time(outage.wall + outage.lasted)
            how = "was degraded" if outage.state == "degraded" else "did not work"
            lasted = duration(outage.lasted)
            line = f"  before   {part} {how} for {lasted}, from {_time(outage.wall)} to {end}"
            if (whole := incident.lasted) is not None and whole > outage.lasted:
                line += f"; all parts worked again {duration(whole)} after the first had stopped"
            yield line
        for words in filter(None, self._causes(incident, part) or [outage.detail]):
            yield f"  because  {words}"
        if cost := self._cost(incident):
            yield f"  cost     {cost_words(cost)}"

    def _open(self) -> _Incident | None:
        return self._incidents[-1] if self._incidents and not self._incidents[-1].over else None

    def _count(self, now: float) -> None:
        if not self._counted or now - self._counted[-1][0] >= BEFORE:
            self._counted.append((now, self._costs()))

    def _conclude(self, incident: _Incident) -> None:
        if incident.over:
            order = self._order()
            parts = sorted(incident.outages, key=lambda part: order.get(part, len(order)))
            incident.outages = {part: incident.outages[part] for part in parts}
            for part in parts:
                incident.outages[part].causes = self._failures(incident, part)
            incident.costs = dict(self._costs() - incident.costs_before)
            self._counted.clear()

    def _cost(self, incident: _Incident) -> dict[str, int]:
        return incident.costs if incident.over else dict(self._costs() - incident.costs_before)

    def _all_causes(self, incident: _Incident) -> list[str]:
        found = (words for part in incident.outages for words in self._causes(incident, part))
        return list(dict.fromkeys(found))[:MAX_CAUSES] or [
            each for each in (incident.first.detail,) if each
        ]

    def _causes(self, incident: _Incident, part: str) -> list[str]:
        return incident.outages[part].causes if incident.over else self._failures(incident, part)

    def _failures(self, incident: _Incident, part: str) -> list[str]:
        """Return the first failure of each component, in the order in which they are started.

        Without those of parts that are started after this one or have not worked yet, and later
        ones of other parts: its own may come after it was degraded. A failure that has passed on to
        other components is listed once.
        """
        order, first = self._order(), dict[str, Event]()
        begin, end = incident.first.at - BEFORE, incident.outages[part].at + BEFORE
        own = _places(order, part)
        starting = {place for other in self._starting for place in _places(order, other)}
        last = max(own, default=len(order))
        apart = {name for name, place in order.items() if place > last or place in starting - own}
        for event in self._recorder.events():
            if event.kind != "failure" or event.at < begin or event.component in apart:
                continue
            if event.at <= end or order.get(event.component) in own:
                first.setdefault(event.component, event)
        causes = sorted(first.values(), key=lambda each: order.get(each.component, len(order)))
        shown: dict[str, str] = {}
        for each in causes:
            reason = each.because[0] if each.because else each.text
            # Without the class of the error: each component may raise its own.
            shown.setdefault(re.sub(r" \(\w+\)$", "", reason), f"{each.component}: {reason}")
        return list(shown.values())[:MAX_CAUSES]


def _places(order: Mapping[str, int], part: str) -> set[int]:
    """Return the places of a part and its components."""
    return {order[name] for name in order if name == part or name.startswith(f"{part}/")}


def _time(wall: float) -> str:
    return f"{datetime.fromtimestamp(wall, tz=UTC).astimezone():%Y-%m-%d %H:%M:%S}"
