"""What the page shows: a map, numbers and states over time, and the changes of all these.

A page loads the history and opens a stream, which begins with the whole state. Then only changes
are sent: a tick every 2 s, or soon after a state has changed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from moored._version import __version__
from moored.kernel import Event, Timers

from ._browser_streams import LIVE, BrowserStream, BrowserStreams, message
from ._graph import graph_of
from ._history import STEP, History
from ._map import Maps, Unit
from ._part import Part
from ._series import Sampler
from ._view import View

__all__ = ["Judgement", "Judgements", "Live"]

#: Seconds from a change to the look at all states, and the least between two looks.
SETTLE = 0.15
LOOKS = 0.5
#: The least seconds between two maps that differ in what is known of the series alone.
MAPS = 5.0
#: Seconds until an answer is sent again of which the times alone have changed, and what those are.
ANSWERS = 10.0
MOVING = ("lasted", "sub", "lines", "since")
#: Outages in the state with which a stream begins.
NEWEST = 5
#: The path of the part of the demo that has the buttons, and what is shown of it.
DEMO = "/faults/faults"
STORY = ("faults", "running", "lines", "last")
#: What several parts in each state do, from the worst state to the best.
SEVERAL = {
    "down": "down",
    "degraded": "degraded",
    "waits": "waiting",
    "starting": "starting",
    "unknown": "not watched",
    "standby": "standing by",
    "asleep": "asleep",
    "works": "working",
}


class Judgement(Protocol):
    """The judgement of a node."""

    @property
    def state(self) -> str:
        """The state that is shown."""

    @property
    def fact(self) -> str:
        """One fact, of at most a dozen words."""


class Judgements(Protocol):
    """Judges the nodes, and keeps the incidents."""

    def judged(self) -> Mapping[str, Judgement]:
        """Return the judgement of each node."""

    def answer(self) -> Mapping[str, Any]:
        """Return what is wrong, since when, why, who waits, what it has cost, and what to do."""

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        """Return the incidents, the newest first."""

    def affected(self) -> Mapping[str, int]:
        """Return the number of the open incident that each affected node is in."""

    def wall_of(self, at: float) -> float:
        """Return a monotonic time in seconds since 1970."""


class Live:
    """Keeps the history, and sends what changes to the open pages."""

    def __init__(
        self,
        view: View,
        parts: Iterable[Part],
        truth: Judgements,
        streams: BrowserStreams,
        name: str,
    ) -> None:
        parts = [part for part in parts if part.shown]
        self.graph = graph_of(parts)
        self.streams = streams
        self._view = view
        self._truth = truth
        self._name = name
        self._maps = Maps(self.graph)
        self._began = view.clock.monotonic()
        self.history = History(self._began)
        self.sampler = Sampler(view.systems, {part.name: part.kind for part in parts})
        self._timers = Timers(view.clock)
        self._loop = asyncio.get_running_loop()
        self._looked = self._began - LOOKS
        self._map = self._maps.map()
        #: The nodes that have left their stacks.
        self._left: set[str] = set()
        # What the streams have been sent.
        self._values: dict[str, float] = {}
        self._nodes: dict[str, dict[str, str]] = {}
        self._version = 0
        self._mapped = self._began
        self._answer: Mapping[str, Any] = {}
        self._answered = self._began
        self._outages: dict[int, Mapping[str, Any]] = {}
        self._story: Mapping[str, Any] | None = None

    # -- time ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to keep the history."""
        self._tick()

    def close(self) -> None:
        """Stop the ticks."""
        self._timers.cancel_all()

    def changed(self) -> None:
        """Look at all states soon, because something has happened."""
        if "look" not in self._timers:
            at = max(self._view.clock.monotonic() + SETTLE, self._looked + LOOKS)
            self._timers.set("look", at, self._look)

    def _tick(self) -> None:
        now = self._view.clock.monotonic()
        number = round((now - self._began) / STEP) + 1
        self._timers.set("tick", self._began + number * STEP, self._tick)
        values = self.sampler.sample(now)
        self.history.write(now, values)
        self._look(values)

    def _look(self, values: Mapping[str, float] | None = None) -> None:
        """Judge all nodes, keep what has changed, and send it."""
        self._timers.cancel("look")
        self._looked = now = self._view.clock.monotonic()
        judged, affected = self._judged(), self._truth.affected()
        for node, each in judged.items():
            self.history.add(now, node, each["state"], affected.get(node))
        moved = self._draw(judged)
        if not self.streams.listening(LIVE):
            return
        if moved or (self.sampler.version != self._version and now >= self._mapped + MAPS):
            self._version, self._mapped = self.sampler.version, now
            self._publish("map", self.map())
        self._publish_changes(judged, values)
        self._publish_outages()
        if (story := self._demo()) is not None and story != self._story:
            self._story = story
            self._publish("story", {name: each for name, each in story.items() if name != "faults"})

    # -- sending -------------------------------------------------------------------------------

    def sink(self, event: Event) -> None:
        """Send an event of the recorder to the streams of events; may be called from any thread."""
        if not self.streams.listening("event"):
            return
        data = json.dumps(event.as_dict(), default=str)
        try:
            self._loop.call_soon_threadsafe(
                self._send, message("event", data, number=event.id), "event"
            )
        except RuntimeError:
            pass  # the loop is closed, and with it every stream

    def join(self, *, events: bool) -> BrowserStream | None:
        """Open a stream that begins with the whole state; return None if there are too many."""
        first = not self.streams.listening(LIVE)
        state = self.state()  # before the stream is opened, in case this fails
        client = self.streams.join({LIVE, "event"} if events else {LIVE})
        if client is not None:
            client.give_state(message("state", _json(state)))
            if first:
                self._nodes, self._values = state["nodes"], state["series"]
                self._answer, self._story = state["answer"], state["demo"]
                self._answered = self._view.clock.monotonic()
                self._outages = {each["id"]: _still(each) for each in self._truth.incidents()}
                self._version, self._mapped = self.sampler.version, self._looked
        return client

    def _publish(self, name: str, data: Mapping[str, Any]) -> None:
        self._send(message(name, _json(data)), LIVE)

    def _send(self, event: bytes, topic: str) -> None:
        # A change that is lost would be missing for ever.
        if late := self.streams.publish(event, topic):
            state = message("state", _json(self.state()))
            for client in late:
                client.give_state(state)

    def _publish_changes(
        self, judged: Mapping[str, Mapping[str, str]], values: Mapping[str, float] | None
    ) -> None:
        answer, now = self._truth.answer(), self._view.clock.monotonic()
        same = _without(answer, MOVING) == _without(self._answer, MOVING)
        if not same or now >= self._answered + ANSWERS:
            self._answer, self._answered = answer, now
            self._publish("answer", answer)
        shown = self._shown(judged)
        nodes = {name: each for name, each in shown.items() if self._nodes.get(name) != each}
        self._nodes = shown
        tick: dict[str, Any] = {"t": self._wall(), "nodes": nodes}
        if values is not None:  # and not only a change of state
            newest, before = self._on_map(values), self._values
            series: dict[str, float | None] = dict.fromkeys(before.keys() - newest.keys())
            series |= {name: each for name, each in newest.items() if before.get(name) != each}
            tick["series"], self._values = series, newest
        if nodes or values is not None:
            self._publish("tick", tick)

    def _publish_outages(self) -> None:
        found = {}
        for each in self._truth.incidents():
            found[each["id"]] = still = _still(each)
            if self._outages.get(each["id"]) != still:
                self._publish("outage", each)
        self._outages = found

    # -- what is shown -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that a page shows now, but for the history."""
        now = datetime.now().astimezone()
        offset = now.utcoffset()
        return {
            "name": self._name,
            "version": __version__,
            "address": self._view.address,
            "now": self._wall(),
            "began": self._truth.wall_of(self._began),
            "zone": 0 if offset is None else offset.total_seconds(),
            "answer": self._truth.answer(),
            "nodes": self._shown(self._judged()),
            "series": self._on_map(self.sampler.last),
            "map": self.map(),
            "outages": list(self._truth.incidents())[:NEWEST],
            "demo": self._demo(),
        }

    def map(self) -> dict[str, Any]:
        """Return the map, with what is known of each series."""
        known = self.sampler.series
        return {
            **self._map.as_dict(known, self.sampler.mains),
            "series": {name: each.as_dict() for name, each in known.items()},
        }

    def history_of(self, span: int, part: str = "") -> dict[str, Any]:
        """Return the numbers of the last seconds, of one part or of all, and the states of all."""
        series = self.sampler.series.items()
        known = {name: each.as_dict() for name, each in series if part in ("", each.part)}
        found = self.history.as_dict(span, self._truth.wall_of(self._began), known)
        return {"now": self._wall(), **found}

    def judged(self, name: str) -> dict[str, str]:
        """Return state and fact of one node."""
        return self._judged()[name]

    def outages_of(self, name: str) -> list[int]:
        """Return the numbers of the incidents that a node was in, the newest first."""
        return [each["id"] for each in self._truth.incidents() if name in each["parts"]]

    def _wall(self) -> float:
        return round(self._truth.wall_of(self._view.clock.monotonic()), 3)

    def _judged(self) -> dict[str, dict[str, str]]:
        """Return state and fact of each node."""
        found = {
            name: {"state": each.state, "fact": each.fact}
            for name, each in self._truth.judged().items()
            if name in self.graph.nodes
        }
        for name, node in self.graph.nodes.items():
            if node.kind == "browsers":
                parts = self.graph.needs[name]
                number = round(sum(self.sampler.last.get(f"{each}.streams", 0) for each in parts))
                fact = f"{number} connected" if number else "none connected"
                found[name] = {"state": "works" if number else "unknown", "fact": fact}
            found.setdefault(name, {"state": "unknown", "fact": "not watched"})
        return found

    def _draw(self, judged: Mapping[str, Mapping[str, str]]) -> bool:
        """Make the map again if other nodes leave their stacks; return whether it was made."""
        bad = {name for name in self._maps.stacked if judged[name]["state"] in ("down", "degraded")}
        if bad == self._left:
            return False
        self._left, self._map = bad, self._maps.map(bad)
        return True

    def _shown(self, judged: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
        """Return what the map shows of each node; of one in a stack, the state alone."""
        found = {}
        for unit in self._map.units.values():
            if unit.is_stack:
                found[unit.id] = _several(unit, judged)
                found |= {each.id: {"state": judged[each.id]["state"]} for each in unit.members}
            else:
                found[unit.id] = dict(judged[unit.id])
        return found

    def _on_map(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of the nodes on the map; those of a stack are in the history alone."""
        units, known = self._map.units, self.sampler.series
        return {name: each for name, each in values.items() if known[name].part in units}

    def _demo(self) -> dict[str, Any] | None:
        """Return what the demo tells about its faults; None if this is no demo."""
        for path, system in self._view.systems.items():
            if path.endswith(DEMO):
                now = system.statistics()
                return {name: now.get(name) for name in STORY}
        return None


def _several(unit: Unit, judged: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the worst state of several nodes, and how many are in each."""
    states = Counter(judged[each.id]["state"] for each in unit.members)
    worst = next(state for state in SEVERAL if states[state])
    return {
        "state": worst,
        "fact": ", ".join(f"{states[each]} {SEVERAL[each]}" for each in SEVERAL if states[each]),
    }


def _still(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an incident without what changes as time passes."""
    return _without(incident, ("lasted", "waiting"))


def _without(data: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    return {name: each for name, each in data.items() if name not in names}


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, default=str, separators=(",", ":"))
