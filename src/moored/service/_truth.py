"""What is true of the service now: judgements of all parts and servers, incidents, the answer.

It looks four times a second, and whenever a part reports its health. Everything that shows the
service takes it from here, so that all show the same.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from moored.kernel import (
    Callers,
    Clock,
    Condition,
    Event,
    Link,
    Recorder,
    StatusMonitor,
    Timers,
    describe,
)

from ._health import READY_STATES, WORKING, PartHealth, Status
from ._incidents import AGAIN, Incidents
from ._judge import GOOD, Judged, Observed, judge, needed
from ._part import System
from ._spans import clock_time, span
from ._words import Now, answer, as_data, lines_of, name_of, sentence, step_words

__all__ = ["Truth"]

log = logging.getLogger("moored.service")

#: Seconds between two looks, and the least pause as a multiple of the time that one takes.
LOOK = 0.25
PAUSE = 50.0
#: The same for a look after a report.
REST = 4.0
#: Seconds after the start in which what is degraded has not begun yet.
NEW = 10.0
#: Seconds until an incident is logged: its root may still be found.
SETTLE = 0.5
#: Seconds by which the clock has been set, and not merely adjusted.
STEPPED = 1.0
#: How parts fail whose own reports do not say why.
BY_LINKS = ("silent", "unreachable", "lost", "waits", "follows", "callers")
NONE = Callers()
#: Failures that are kept until the next look.
FAILURES = 50
#: Seconds before an incident is noticed in which its failure may have been recorded.
RECENT = 1.0


class Truth:
    """Judges all parts and servers of a service, and keeps its incidents.

    :param ties: the parts, and the addresses of servers, that each part needs; its keys are the
        parts that are judged.
    :param runs: the part that runs a server, by the address of the server.
    :param systems: the systems of the parts, by the path of the child that runs each.
    :param keeping: the parts that keep their place while they wait, so that nothing is lost.
    :param started: whether the service has been ready.
    """

    def __init__(
        self,
        health: PartHealth,
        monitor: StatusMonitor[Status],
        recorder: Recorder,
        clock: Clock,
        *,
        ties: Mapping[str, Collection[str]],
        runs: Mapping[str, str] | None = None,
        systems: Mapping[str, System] | None = None,
        keeping: Collection[str] = (),
        started: Callable[[], bool] = lambda: False,
    ) -> None:
        self._health = health
        self._monitor = monitor
        self._recorder = recorder
        self._clock = clock
        self._ties = ties
        self._runs = runs or {}
        self._systems = {} if systems is None else systems
        self._keeping = keeping
        self._started = started
        self._began = clock.monotonic()
        self._details: dict[str, str] = {}
        #: When each part has worked for the last time, and when at least in part.
        self._worked_at: dict[str, float] = {}
        self._ran_at: dict[str, float] = {}
        #: The parts that have worked since they last stood by or slept.
        self._worked: set[str] = set()
        self._judged: dict[str, Judged] = {}
        #: Since when each part and server is in its state.
        self._since: dict[str, float] = {}
        self._incidents = Incidents(lambda node, of: (step_words(node, of), name_of(node, of)))
        self._stopped = False
        self._failures: deque[Event] = deque(maxlen=FAILURES)
        self._timers: Timers | None = None
        #: Whether a part has reported since the last look.
        self._reported = True
        #: When the last look ended, and how long it took.
        self._looked = self._took = 0.0
        self._unsubscribe: Callable[[], None] = lambda: None
        self._subscribers: list[Callable[[], None]] = []
        #: What to add to a monotonic time, to get seconds since 1970.
        self._wall = clock.wall() - clock.monotonic()
        #: When each node was well at the last look at which it was.
        self._good_at: dict[str, float] = {}
        #: The methods of systems that have failed.
        self._broken: set[tuple[str, str]] = set()

    # -- queries -------------------------------------------------------------------------------

    def judged(self) -> Mapping[str, Judged]:
        """Return the judgement of each part and server."""
        if self._timers is None or self._reported:
            self.look()
        return self._judged

    def answer(self) -> dict[str, Any]:
        """Return how the service is, and the answers about what is broken."""
        found = answer(self._fresh())
        return {**found, "lines": [list(each) for each in lines_of(found)]}

    def sentence(self) -> str:
        """Return how the service is, in one line."""
        return sentence(self._fresh())

    def incidents(self) -> list[dict[str, Any]]:
        """Return the last incidents as plain data, the newest first."""
        now = self._fresh()
        return [as_data(each, now) for each in now.incidents]

    def incident(self, number: int) -> dict[str, Any] | None:
        """Return the incident with this number as plain data, if it is still kept."""
        now = self._now()
        return next((as_data(each, now) for each in now.incidents if each.id == number), None)

    @property
    def parts(self) -> Collection[str]:
        """The parts that are judged; servers are no parts."""
        return self._ties.keys()

    def affected(self) -> dict[str, int]:
        """Return the number of the incident that affects each part or server now."""
        return {n: each.id for each in reversed(self._incidents.open()) for n in each.affected()}

    def wall_of(self, at: float) -> float:
        """Return a monotonic time in seconds since 1970, by the clock as it is set now."""
        wall = self._clock.wall() - self._clock.monotonic()
        if abs(wall - self._wall) > STEPPED:  # and not when it is adjusted slowly
            self._wall = wall
        return at + self._wall

    def totals(self) -> tuple[dict[str, int], dict[str, float], float]:
        """Return the number and the seconds of past incidents by root, and those of the present."""
        now = self._clock.monotonic()
        numbers, seconds = self._incidents.totals(now)
        return numbers, seconds, max((i.lasted(now) for i in self._incidents.open()), default=0.0)

    def explain(self, node: str) -> Iterator[str]:
        """Yield how a part or server is, since when, and why, as lines of an explanation."""
        found = self.judged()[node]
        since = self._incidents.since(node)
        since = self._since[node] if since is None else since
        yield f"{found.state} for {span(self._clock.monotonic() - since)}"
        if node not in self._ties or found.how in BY_LINKS:
            known = dict.fromkeys(filter(None, (found.fact, found.why)))
            yield from (f"  because  {each}" for each in known)

    def outage_of(self, node: str) -> Iterator[str]:
        """Yield the last incident of a part or server as lines of an explanation."""
        if (found := self._incidents.last_of(node)) is None:
            return
        now = self._fresh()
        data = as_data(found, now)
        begin, lasted = clock_time(data["sign_of_life"]), span(data["lasted"])
        when = f"for {lasted}, from {begin} to {clock_time(data['ended'] or 0.0)}"
        if data["ended"] is None:
            when = f"since {begin}, for {lasted}"
        name, why = name_of(node, now.judged), data["why"]
        if node == found.root:
            line = f"{data['what']} {when}"
        else:
            states = {state for _, _, state in data["parts"][node]}
            past = found.ended is not None
            how = "works only in part", "worked only in part"
            if states & {"down"}:
                how = "does not work", "did not work"
            if states == {"waits"}:
                of = name_of(found.root, now.judged)
                how = f"waits for {of}", f"waited for {of}"
            line, why = f"{name} {how[past]} {when}", ": ".join(filter(None, (data["what"], why)))
        yield f"  {'now' if found.ended is None else 'before':<8} {line} (outage {found.id})"
        if why:
            yield f"  because  {why}"
        if data["cost"]:
            yield f"  cost     {data['cost_words']}"

    # -- changes -------------------------------------------------------------------------------

    def start(self) -> None:
        """Look from now on, until `stop()`."""
        self._timers = Timers(self._clock)
        self._unsubscribe = self._recorder.subscribe(self._note_failure)
        self._look_again()

    def stop(self) -> None:
        """Stop looking: what the stop of the service breaks is no incident."""
        if self._timers is not None:
            self._timers.cancel_all()
        self._unsubscribe()
        self._stopped = True

    def report(self, part: str, before: Status, state: Status, detail: str) -> None:
        """Take the health of a part."""
        if self._stopped:
            return
        self._details[part] = detail
        if before in ("waiting", "sleeping") and state == "starting":
            # It takes over, or wakes up: nothing has failed.
            self._worked.discard(part)
            self._worked_at.pop(part, None)
        elif before in WORKING and state not in WORKING:
            self._worked.add(part)
            self._worked_at[part] = self._clock.monotonic()
        if before in READY_STATES and state not in READY_STATES:
            self._ran_at[part] = self._clock.monotonic()
        if before != state and self._timers is not None:
            self._reported = True
            self._look_soon()

    @property
    def is_broken(self) -> bool:
        """Whether there is an incident now."""
        return bool(self._incidents.open())

    def strikes(self, fault: str | None) -> None:
        """Note which fault the demo causes now; incidents that begin meanwhile are named for it."""
        self._incidents.fault = fault

    def incident_by(self, fault: str, since: float) -> dict[str, Any] | None:
        """Return the incident of a fault of the demo that began after this time, if any."""
        found = self._incidents.by_fault(fault, since)
        return None if found is None else as_data(found, self._now())

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call back when incidents have changed; return how to unsubscribe."""
        self._subscribers.append(changed)
        return lambda: self._subscribers.remove(changed)

    # -- looking -------------------------------------------------------------------------------

    def look(self) -> None:
        """Judge all parts and servers now."""
        if self._stopped:
            return
        self._reported = False
        now = self._clock.monotonic()
        systems, conditions = self._systems_of_parts(), self._monitor.conditions()
        states = self._health.states(conditions)
        seen = {
            part: self._observed(part, states[part], conditions, systems.get(part, ()), now)
            for part in self._ties
        }
        before = self._judged
        self._judged = judge(seen, self._ties, self._runs, now, self._good_at)
        for node, each in self._judged.items():
            if node not in before or before[node].state != each.state:
                self._since[node] = now
            if each.state in GOOD:
                self._good_at[node] = now
        self._incidents.count(now, self._costs)
        changed = self._incidents.update(
            now,
            self._judged,
            cache(lambda: needed(seen, self._ties, self._runs)),
            self._costs,
        )
        self._add_failures(now)
        self._log_outages(now)
        if changed:
            for tell in tuple(self._subscribers):
                tell()

    def _look_again(self) -> None:
        assert self._timers is not None
        began = self._clock.monotonic()
        try:
            self.look()
        finally:
            now = self._clock.monotonic()
            self._took, self._looked = now - began, now
            self._timers.set("look", now + max(LOOK, PAUSE * self._took), self._look_again)

    def _look_soon(self) -> None:
        """Look once for all parts that report now, however many there are."""
        assert self._timers is not None
        at = max(self._clock.monotonic(), self._looked + REST * self._took)
        self._timers.set("look", at, self._look_again)

    def _observed(
        self,
        part: str,
        health: Status,
        conditions: Mapping[str, Condition],
        systems: Sequence[System],
        now: float,
    ) -> Observed:
        if health in WORKING:
            self._worked_at[part] = now
        if health in READY_STATES:
            self._ran_at[part] = now
        # What begins degraded, and stays so, works in part.
        if health in WORKING or (health == "degraded" and now - self._began > NEW):
            self._worked.add(part)
        links = [
            self._known(part, link)
            for each in systems
            for link in self._ask(part, each, "links", ())
        ]
        callers = [
            each
            for each in (self._ask(part, each, "hanging", NONE) for each in systems)
            if each.number
        ]
        facts = (self._ask(part, each, "fact", "") for each in systems)
        detail = self._details.get(part, "")
        return Observed(
            health,
            detail,
            worked=part in self._worked,
            says=self._health.says(part),
            links=links,
            callers=_all_of(callers) if callers else NONE,
            fact=next(filter(None, facts), ""),
            worked_at=self._worked_at.get(part) or self._health.since(part, conditions),
            ran_at=self._ran_at.get(part),
            follows=self._incidents.follows(part, now),
        )

    def _ask(self, part: str, system: System, name: str, otherwise: Any) -> Any:
        """Call a method that a system may have; the first failure of each is logged."""
        if (method := getattr(system, name, None)) is None:
            return otherwise
        try:
            return method()
        except Exception as error:
            if (part, name) not in self._broken:
                self._broken.add((part, name))
                log.warning("%s() of %s failed: %s", name, part, describe(error))
            return otherwise

    def _known(self, part: str, link: Link) -> Link:
        """Return a link, to the only server that the part is known to need if it names another."""
        ties = self._ties[part]
        servers = [each for each in ties if each not in self._ties and each not in self._runs]
        if link.server in self._runs or link.server in ties or len(servers) != 1:
            return link
        return link._replace(server=servers[0])

    def _systems_of_parts(self) -> dict[str, list[System]]:
        found: dict[str, list[System]] = {}
        for path, system in list(self._systems.items()):
            found.setdefault(path.split("/")[1], []).append(system)
        return found

    def _costs(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for part, systems in self._systems_of_parts().items():
            found[part] = Counter()
            for each in systems:
                found[part].update(self._ask(part, each, "costs", {}))
        return found

    def _fresh(self) -> Now:
        self.judged()
        return self._now()

    def _now(self) -> Now:
        now = self._clock.monotonic()
        status = self._monitor.status()
        return Now(
            self._judged,
            self._incidents.all(now),
            now,
            self.wall_of(0.0),
            self._began,
            started=self._started(),
            ready=status in READY_STATES,
            parts=self._ties,
            required=self._health.required,
            keeping=self._keeping,
        )

    def _note_failure(self, event: Event) -> None:
        """Keep a failure until the next look; may be called from any thread."""
        if event.kind == "failure":
            self._failures.append(event)

    def _add_failures(self, now: float) -> None:
        """Add recorded failures to the incident of their part, which may be noticed later."""
        for event in list(self._failures):
            names = (event.component, *event.component.split("/")[:2])
            part = next((each for each in names if each in self._ties), None)
            why = event.because[0] if event.because else event.text
            known = part is not None and self._incidents.failed(part, now, why)
            if known or part is None or now - event.at > RECENT:
                self._failures.remove(event)

    def _log_outages(self, now: float) -> None:
        """Log each incident when its root has been found, and when it has ended for good."""
        for incident in self._incidents.all(now):
            ended, number = incident.ended, incident.id
            if not incident.logged and (ended is not None or now - incident.noticed >= SETTLE):
                incident.logged = "begun"
                data = as_data(incident, self._now())
                text = ": ".join(filter(None, (data["what"], data["why"])))
                log.warning("outage %d: %s", number, text)
            # Not before: the same trouble may return, and make it longer.
            if incident.logged == "begun" and ended is not None and now - ended >= AGAIN:
                incident.logged = "over"
                data = as_data(incident, self._now())
                lasted, cost = span(data["lasted"]), data["cost_words"]
                log.warning("outage %d ended after %s: %s; %s", number, lasted, data["what"], cost)


def _all_of(callers: Sequence[Callers]) -> Callers:
    return Callers(sum(each.number for each in callers), max(each.longest for each in callers))
