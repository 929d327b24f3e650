"""The incidents: what was broken, since when, whose fault it was, who waited, and what it cost.

An incident begins with the last sign of life of its root, and ends when all its parts work again.
A fault joins an incident that affects its root already, or that was noticed lately and shares a
server or a part with it: one may follow from the other. All other faults are incidents of their
own. No I/O: the judgements and the time are passed in.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from moored.kernel import Callers

from ._judge import BAD, Judged, Shown
from ._spans import span

__all__ = ["Incident", "Incidents", "Span"]

#: Incidents that are kept, besides those of the last hour.
KEPT = 50
KEPT_FOR = 3600.0
#: The most incidents that are kept: a part may fail once a second.
MOST = 500
#: Seconds after the end in which the same trouble is still the same incident.
AGAIN = 2.0
#: Seconds that a part may take to come back after its root; then it is a root itself.
GRACE = 10.0
#: Seconds after an incident was noticed in which other faults may turn out to be its cause.
YOUNG = 30.0
#: Steps that are kept for one incident.
STEPS = 30
#: Seconds between two counts of costs, and how many are kept: an incident begins before it is
#: noticed, and its cost is the difference to the count before that.
COUNT_EVERY = 1.0
COUNTS = 15

Costs = Mapping[str, Counter[str]]
Words = Callable[[str, Mapping[str, Judged]], tuple[str, str]]
#: How bad each way to fail is: the worst one names the incident.
_WORSE = ("degraded", "callers", "lost", "unreachable", "silent", "ended", "failed")


class Span(NamedTuple):
    """How long a part or server was in one state of an incident; in monotonic seconds."""

    begin: float
    end: float | None
    state: Shown


@dataclass
class Incident:
    """One incident; times are monotonic seconds."""

    id: int
    root: str
    #: The judgement of the root that says most.
    judged: Judged
    #: The last time at which the root was heard, or worked.
    sign_of_life: float
    noticed: float
    costs_before: Costs
    ended: float | None = None
    #: Of each part and server that was affected, the times at which it was.
    spans: dict[str, list[Span]] = field(default_factory=dict)
    #: What happened, each with its time.
    steps: list[tuple[float, str]] = field(default_factory=list)
    costs: Counter[str] = field(default_factory=Counter)
    #: Callers that wait now.
    callers: Callers = field(default_factory=Callers)
    #: The fault of the demo that caused it.
    fault: str | None = None
    #: Since when the root works again, while others still come back.
    root_back: float | None = None
    #: The end of an incident that it continues: it does not begin before.
    after: float = -math.inf
    #: How much of it was logged.
    logged: Literal["", "begun", "over"] = ""

    def lasted(self, now: float) -> float:
        """Return its length in seconds, until now or its end."""
        return max((now if self.ended is None else self.ended) - self.sign_of_life, 0.0)

    def affected(self) -> list[str]:
        """Return the parts and servers that still do not work, the root first."""
        return [node for node, spans in self.spans.items() if spans[-1].end is None]

    def state(self) -> Shown:
        """Return the state of the root, as it was at worst."""
        found = {each.state for each in self.spans.get(self.root, ())}
        return "down" if "down" in found else "degraded"

    def step(self, at: float, text: str) -> None:
        """Add a step, unless it is the last one already; of too many, those between go."""
        if not self.steps or self.steps[-1][1] != text:
            if len(self.steps) >= STEPS:
                del self.steps[STEPS // 2]
            self.steps.append((at, text))


class Incidents:
    """The incidents of a service.

    :param words: returns how a node is, as a step of an incident, and what it is called.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._all: list[Incident] = []
        #: Those that have not ended.
        self._open: list[Incident] = []
        self._number = 0
        #: Of incidents that are no longer kept: their number and their seconds, by root.
        self._numbers: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._counts: deque[tuple[float, Costs]] = deque(maxlen=COUNTS)
        #: The name of the fault that the demo causes now.
        self.fault: str | None = None

    # -- queries -------------------------------------------------------------------------------

    def all(self, now: float) -> list[Incident]:
        """Return the last incidents, the newest first."""
        found = list(reversed(self._all))
        return [
            each
            for number, each in enumerate(found)
            if number < KEPT or each.ended is None or now - each.ended < KEPT_FOR
        ]

    def open(self) -> list[Incident]:
        """Return the incidents that have not ended."""
        return list(self._open)

    def of(self, node: str) -> Incident | None:
        """Return the incident that affects a part or server now."""
        return next((each for each in self.open() if node in each.affected()), None)

    def since(self, node: str) -> float | None:
        """Return since when a node is affected by an incident; None if it is not."""
        found = self.of(node)
        return None if found is None else found.spans[node][0].begin

    def last_of(self, node: str) -> Incident | None:
        """Return the last incident that has affected a part or server."""
        return next((each for each in reversed(self._all) if node in each.spans), None)

    def by_fault(self, fault: str, since: float) -> Incident | None:
        """Return the first incident of a fault of the demo that was noticed after this time."""
        return next((i for i in self._all if i.fault == fault and i.noticed >= since), None)

    def follows(self, node: str, now: float) -> str | None:
        """Return the root that a node has waited for, while it may still be coming back."""
        if any(each.root == node for each in self._open):
            return None  # its own fault is older
        for each in self._open:
            spans = each.spans.get(node)
            waits = spans and spans[-1].end is None and spans[-1].state == "waits"
            if waits and (each.root_back is None or now - each.root_back < GRACE):
                return each.root
        return None

    def totals(self, now: float) -> tuple[dict[str, int], dict[str, float]]:
        """Return the number and the seconds of all incidents that are over for good, by root."""
        numbers, seconds = Counter(self._numbers), dict(self._seconds)
        for each in self._all:
            if each.ended is not None and now - each.ended >= AGAIN:
                _add(each, numbers, seconds)
        return numbers, seconds

    # -- updates -------------------------------------------------------------------------------

    def count(self, now: float, costs: Callable[[], Costs]) -> None:
        """Count what failures have cost so far, at most once a second."""
        if not self._counts or now - self._counts[-1][0] >= COUNT_EVERY:
            self._counts.append((now, costs()))

    def failed(self, node: str, now: float, why: str) -> bool:
        """Add a recorded failure of a part to the incident that affects it; False without one."""
        if (found := self.of(node)) is None:
            return False
        why = _plain(why)
        if node == found.root and not found.judged.why:
            found.judged = replace(found.judged, why=why)
        known = [
            _plain(found.judged.why),
            *(text.rpartition(f"{node}: ")[2] for _, text in found.steps),
        ]
        if why not in known:
            found.step(now, f"{node}: {why}")
        return True

    def update(
        self,
        now: float,
        judged: Mapping[str, Judged],
        needs: Callable[[], Mapping[str, Collection[str]]],
        costs: Callable[[], Costs],
    ) -> bool:
        """Take the judgements of all nodes; return whether an incident has changed.

        :param needs: returns all nodes that each node needs, also indirectly.
        """
        changed = False
        before = {each.id: _shape(each) for each in self._open}
        self._follow_roots(judged, now)
        bad = {node: each for node, each in judged.items() if each.state in BAD and each.roots}
        owners: dict[str, Incident] = {}
        for root in dict.fromkeys(root for each in bad.values() for root in each.roots):
            owners[root] = incident = self._incident(root, now, judged, needs())
            self._describe(incident, root, judged)
            mine = (node for node, each in bad.items() if root in each.roots)
            for node in sorted(mine, key=lambda each: each != root):
                self._affect(incident, node, judged, now)
        still_open = self.open()
        after = costs() if still_open else {}
        for incident in still_open:
            self._recover(incident, bad, judged, owners, now)
            changed = changed or before.get(incident.id) != _shape(incident)
            incident.costs = _difference(after, incident.costs_before, incident.spans)
            incident.callers = _callers(judged[each] for each in incident.affected())
        return changed

    def _incident(
        self,
        root: str,
        now: float,
        judged: Mapping[str, Judged],
        needs: Mapping[str, Collection[str]],
    ) -> Incident:
        """Return the incident of a root: one that it belongs to, or a new one."""
        at, after = judged[root].heard_at, -math.inf
        at = now if at is None else min(at, now)
        for each in sorted(self._open, key=lambda each: each.root != root):
            if each.root == root:
                if now - each.noticed < YOUNG:  # another of its links may have been lost before
                    self._begin_earlier(each, at)
                return each
            if root in each.affected():
                if each.root_back is None or now - each.root_back < GRACE:
                    return each
                after = each.root_back  # from then on it is its own fault
            elif now - each.noticed < YOUNG and _share(root, each.root, needs):
                return each
        for each in reversed(self._all):
            lately = each.ended is not None and now - each.ended < AGAIN
            if lately and root in each.spans and each.fault == self.fault:
                each.ended = None
                self._open.append(each)
                return each
        self._number += 1
        at = max(at, after)
        found = Incident(self._number, root, judged[root], at, now, self._costs_before(at))
        found.fault, found.after = self.fault, after
        self._all.append(found)
        self._open.append(found)
        self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop the oldest incident that has ended, if there are too many."""
        if len(self._all) > MOST:
            oldest = next((each for each in self._all if each.ended is not None), None)
            if oldest is not None:
                _add(oldest, self._numbers, self._seconds)
                self._all.remove(oldest)

    def _costs_before(self, at: float) -> Costs:
        """Return the last count before this time, or the first one."""
        earlier = [count for when, count in self._counts if when <= at]
        return earlier[-1] if earlier else self._counts[0][1]

    def _begin_earlier(self, incident: Incident, at: float | None) -> None:
        """Let an incident begin at this time, unless it began before."""
        if at is not None and incident.after <= at < incident.sign_of_life:
            spans = incident.spans.get(incident.root)
            if spans and spans[0].begin == incident.sign_of_life:
                spans[0] = spans[0]._replace(begin=at)
            incident.sign_of_life, incident.costs_before = at, self._costs_before(at)

    def _follow_roots(self, judged: Mapping[str, Judged], now: float) -> None:
        """Move the root of each young incident to what its root waits for."""
        for incident in self._open:
            found = judged.get(incident.root)
            if found is None or found.how != "waits" or now - incident.noticed >= YOUNG:
                continue
            root = found.roots[0]
            if any(each.root == root for each in self._open):
                continue
            incident.root, incident.judged = root, judged[root]
            self._begin_earlier(incident, judged[root].heard_at)
            incident.spans = {root: incident.spans.pop(root, []), **incident.spans}
            if not incident.spans[root]:
                incident.spans[root] = [Span(incident.sign_of_life, None, judged[root].state)]
                incident.step(now, self._words(root, judged)[0])

    def _describe(self, incident: Incident, root: str, judged: Mapping[str, Judged]) -> None:
        """Keep the judgement of the root that says most."""
        found = judged[root]
        if root == incident.root and _badness(found) > _badness(incident.judged):
            incident.judged = found

    def _affect(
        self, incident: Incident, node: str, judged: Mapping[str, Judged], now: float
    ) -> None:
        """Note that a node is affected by an incident, in its present state."""
        state = judged[node].state
        spans = incident.spans.setdefault(node, [])
        if spans and spans[-1].end is None:
            if spans[-1].state == state:
                return
            last = spans.pop()
            if last.begin < now:
                spans.append(last._replace(end=now))
        begin = incident.sign_of_life if not spans and now == incident.noticed else now
        spans.append(Span(begin, None, state))
        if judged[node].how != "follows":
            incident.step(now, self._words(node, judged)[0])

    def _recover(
        self,
        incident: Incident,
        bad: Mapping[str, Judged],
        judged: Mapping[str, Judged],
        owners: Mapping[str, Incident],
        now: float,
    ) -> None:
        """Note which nodes of an incident work again, and its end."""
        root_works = incident.root not in bad
        if root_works and incident.root_back is None:
            incident.root_back = now
        elif not root_works:
            incident.root_back = None
        rest: set[int] = set()
        for node in incident.affected():
            end = now
            if (found := bad.get(node)) is not None:
                mine = [owners[root] for root in found.roots]
                # What its root waits for hides how the root is.
                hidden = node == incident.root and found.how in ("waits", "follows")
                if incident in mine or hidden:
                    continue
                rest.update(each.id for each in mine)
                end = now if incident.root_back is None else incident.root_back
            spans = incident.spans[node]
            spans[-1] = spans[-1]._replace(end=max(end, spans[-1].begin))
            if node in judged and found is None:
                incident.step(now, f"{self._words(node, judged)[1]} works again")
        if not incident.affected():
            incident.ended = max(each[-1].end or now for each in incident.spans.values())
            self._open.remove(incident)
            after = f"after {span(incident.lasted(now))}"
            others = " and ".join(map(str, sorted(rest)))
            text = f"what still fails is outage {others}" if rest else f"all work again, {after}"
            incident.step(now, text)


def _share(one: str, other: str, needs: Mapping[str, Collection[str]]) -> bool:
    """Whether two nodes need the same, or one needs the other."""
    return bool({one, *needs.get(one, ())} & {other, *needs.get(other, ())})


def _badness(found: Judged) -> tuple[int, bool]:
    """Return how bad a judgement of a root is; what it does not work without counts more."""
    return _WORSE.index(found.how) if found.how in _WORSE else -1, found.state == "down"


def _plain(why: str) -> str:
    """Return a reason without the classes of errors."""
    return re.sub(r" \([A-Z]\w+\)", "", why)


def _add(incident: Incident, numbers: Counter[str], seconds: dict[str, float]) -> None:
    numbers[incident.root] += 1
    seconds[incident.root] = seconds.get(incident.root, 0.0) + incident.lasted(incident.noticed)


def _shape(incident: Incident) -> tuple[object, ...]:
    """Return what is compared to find out whether an incident has changed."""
    affected = tuple((node, len(spans), spans[-1].end) for node, spans in incident.spans.items())
    return incident.root, incident.ended, incident.judged.how, affected


def _difference(after: Costs, before: Costs, parts: Collection[str]) -> Counter[str]:
    """Return what was added to the costs of these parts."""
    found: Counter[str] = Counter()
    for part in parts:
        found.update(after.get(part, Counter()) - before.get(part, Counter()))
    return found


def _callers(judged: Iterator[Judged]) -> Callers:
    """Return how many callers of these nodes wait, and the longest for how long."""
    waiting = [each.callers for each in judged if each.callers.number]
    number = sum(each.number for each in waiting)
    return Callers(number, max((each.longest for each in waiting), default=0.0))
