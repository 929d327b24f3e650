"""The state of the whole service, for the status, the page and the metrics."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from moored._version import __version__
from moored.kernel import (
    Clock,
    Machine,
    Recorder,
    StatusMonitor,
    Tree,
    describe,
    duration,
)

from ._health import READY_STATES, WORKING, PartHealth, Status
from ._part import System
from ._truth import Truth

__all__ = ["View", "grafted"]

log = logging.getLogger("moored.service")

#: Events in a full state, and in an explanation.
RECENT = 50


def grafted(tree: Tree, others: Mapping[str, Tree], path: str = "") -> Tree:
    """Return a tree with other trees inserted below the nodes with these paths."""
    path = f"{path}/{tree.name}" if path else tree.name
    children = tuple(grafted(child, others, path) for child in tree.children)
    if path in others:
        children += others[path].children
    return replace(tree, children=children)


@dataclass
class View:
    """A read-only view of the service."""

    root: Callable[[], Tree]
    monitor: StatusMonitor[Status]
    part_health: PartHealth
    recorder: Recorder
    clock: Clock
    machines: Mapping[Machine, str] = field(default_factory=dict)
    #: The systems of the parts, by the path of the child that runs each.
    systems: Mapping[str, System] = field(default_factory=dict)
    #: What the parts depend on: other parts, and servers.
    ties: Mapping[str, Collection[str]] = field(default_factory=dict)
    #: The URL of the service.
    address: str = ""
    #: Returns whether the service has been ready.
    started: Callable[[], bool] = lambda: False
    shared_truth: InitVar[Truth | None] = None
    #: The judgement of all parts and servers, and the incidents; by default one of its own.
    truth: Truth = field(init=False)
    _began: float = field(init=False)
    _began_wall: float = field(init=False)

    def __post_init__(self, shared_truth: Truth | None) -> None:
        self._began = self.clock.monotonic()
        self._began_wall = self.clock.wall()
        self.truth = shared_truth or Truth(
            self.part_health,
            self.monitor,
            self.recorder,
            self.clock,
            ties={part: self.ties.get(part, ()) for part in self.part_health.names},
            systems=self.systems,
            started=self.started,
        )

    @property
    def status(self) -> Status:
        """The health of the service: the worst of its parts."""
        return self.monitor.status()

    def parts(self) -> dict[str, Status]:
        """Return the health of each part."""
        return self.part_health.states(self.monitor.conditions())

    def degraded(self) -> list[str]:
        """Return the parts that do not work, or not fully, whether they are required or not."""
        return [part for part, state in self.parts().items() if state not in WORKING]

    def tree(self) -> Tree:
        """Return the supervision tree, including the trees of the systems."""
        return grafted(self.root(), self._trees())

    def shown_tree(self) -> Tree:
        """Return the tree with the health of a part instead of "running" if it is not active.

        A child may be running while it waits for a server that is down; so the root, each part and
        each child that runs a system show the health of the part instead of "running".
        """
        tree = self.tree()
        health = {f"{tree.name}/{part}": state for part, state in self.parts().items()}
        health |= {path: health[part] for path in self.systems if (part := _above(path)) in health}
        return _with_health(tree, {tree.name: self.status, **health})

    def _trees(self) -> dict[str, Tree]:
        return {path: tree for path, each in self.systems.items() if (tree := _tree_of(each))}

    @property
    def uptime(self) -> float:
        """Seconds since the service began to start."""
        return self.clock.monotonic() - self._began

    def as_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data for JSON."""
        answer = self.truth.answer()
        return {
            "status": self.status,
            "ready": self.status in READY_STATES,
            "started": self.started(),
            "degraded": self.degraded(),
            "sentence": self.sentence(),
            "sentence_for": answer["lasted"] or 0.0,
            "answer": answer,
            "nodes": {
                node: {"state": each.state, "fact": each.fact}
                for node, each in self.truth.judged().items()
            },
            "parts": self.parts(),
            "conditions_of": {part: self.part_health.conditions(part) for part in self.parts()},
            "kinds": {self._label(path): _kind(path) for path in self.systems},
            "outages": self.truth.incidents(),
            "version": __version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "address": self.address,
            "started_at": self._began_wall,
            "uptime": self.uptime,
            "conditions": self.monitor.as_dict()["conditions"],
            "machines": [
                {**each.as_dict(), "part": part, "states": [str(one) for one in each.chart.states]}
                for each, part in self.machines.items()
            ],
            **{self._label(path): _numbers_of(each) for path, each in self.systems.items()},
            "tree": self.shown_tree().as_dict(),
            "events": [event.as_dict() for event in self.recorder.events(limit=RECENT)],
        }

    def sentence(self) -> str:
        """Return how the service is, in one sentence."""
        return self.truth.sentence()

    def components(self) -> tuple[str, ...]:
        """Return the components that can be explained: all paths of the tree, and those that only
        the recorder has."""
        paths = self._paths()
        others = {name for path, name in paths.items() if path != name}
        return tuple(sorted({*paths, *self.recorder.components()} - others))

    def find(self, wanted: str) -> list[str]:
        """Return the component with this path or name, a part, or those whose path ends with it."""
        wanted = wanted.strip("/")
        known = self.components()
        servers = self.truth.judged().keys() - self.parts().keys()
        if wanted in (*known, *self.recorder.components(), *map(_part_of, self.systems), *servers):
            return [wanted]
        found = [name for name in known if name.endswith(f"/{wanted}")]
        part = f"{self.root().name}/{wanted}"  # and not its child of the same name
        return [part] if part in found else found

    def explain(self, component: str) -> dict[str, Any]:
        """Return why a component is in its present state, as text and as events."""
        recorded = self._paths().get(component, component)
        events = self.recorder.events(recorded, limit=RECENT)
        return {
            "component": component,
            "explanation": self._explanation(component, recorded),
            "events": [event.as_dict() for event in events],
        }

    def _explanation(self, component: str, recorded: str) -> str:
        for path, system in self.systems.items():
            if component in (path, _above(path), _part_of(path)):
                try:
                    text = system.explain()
                except Exception as error:
                    text = f"{_broken(error)}\n{self.recorder.explain(recorded)}"
                # The outages of a system are those of its part, which have one length.
                lines = [each for each in text.splitlines() if not each.startswith("  before ")]
                part = _part_of(path)
                if not text or text.startswith(" "):
                    lines = [*self._health_of(part), *lines]
                return "\n".join([*lines, *self._history_of(part)])
        name = component if component in self.truth.judged() else component.partition("/")[2]
        if name not in self.parts() and name in self.truth.judged():
            return "\n".join([*self.truth.explain(name), *self.truth.outage_of(name)])
        if name in self.parts():
            return "\n".join([*self._health_of(name), *self._history_of(name)])
        return "\n".join([self.recorder.explain(recorded), *self._outages_around(component)])

    def _health_of(self, part: str) -> Iterator[str]:
        """Yield the health of a part, since when, and the details of its conditions."""
        if part in self.truth.judged():
            lines = list(self.truth.explain(part))
        else:
            since = self.part_health.since(part, self.monitor.conditions())
            lines = [f"{self.parts()[part]} for {duration(self.clock.monotonic() - since)}"]
        if len(lines) == 1 or self.parts()[part] not in WORKING:
            # What a part reports while it works does not explain why it is judged to be down.
            lines += [f"  because  {each}" for each in self.reasons(part)]
        yield from dict.fromkeys(lines)

    def _history_of(self, part: str) -> Iterator[str]:
        """Yield the restarts of the children of a part, the next attempt, and its last outage."""
        known = {None, *self.reasons(part)}
        for path, node in self.root().paths():
            if _part_of(f"{path}/") == part and node.restarts:
                new = node.last_failure not in known
                yield f"  restarts {node.restarts}" + (f": {node.last_failure}" if new else "")
                for event in self.recorder.events(path, limit=1):
                    if node.state == "waiting" and "delay" in event.data:
                        left = duration(event.data["delay"] - node.since)
                        yield f"  so       it starts again in {left}"
                    elif self.parts()[part] not in READY_STATES:
                        lasted = duration(node.since)
                        yield f"  so       it has been {node.state} again for {lasted}"
        yield from self.truth.outage_of(part)

    def reasons(self, part: str) -> Iterator[str]:
        """Yield the details of the conditions of a part."""
        state, conditions = self.parts()[part], self.monitor.conditions()
        for name in self.part_health.conditions(part):
            detail = (conditions[name].detail or "").removeprefix(f"{state}: ")
            if detail and detail != state:
                yield detail

    def _outages_around(self, component: str) -> Iterator[str]:
        """Yield the last outage of each part whose system is above or below this path."""
        for part in {
            _part_of(path)
            for path in self.systems
            if path.startswith(f"{component}/") or component.startswith(f"{path}/")
        }:
            yield from self.truth.outage_of(part)

    def _paths(self) -> dict[str, str]:
        """Return the paths of the tree, each with the component of its events in the recorder."""
        paths = {path: path for path, _ in self.root().paths()}
        for path, tree in self._trees().items():
            for inner, _ in tree.paths():
                below = inner.removeprefix(tree.name)
                if below:
                    paths[path + below] = inner
        return paths

    def start_order(self) -> dict[str, int]:
        """Return the place of each component in the order in which the components are started."""
        places: dict[str, int] = {}
        recorded = self._paths()
        for place, (path, _) in enumerate(self.tree().paths()):
            # The events of a pool have its name alone.
            for name in (recorded.get(path, path), path.partition("/")[2]):
                places.setdefault(name, place)
        return places

    def _label(self, path: str) -> str:
        """Return the key of a system in the status: its part, or its path if not unique."""
        part = _part_of(path)
        alone = [_part_of(each) for each in self.systems].count(part) == 1
        return part if alone else path.partition("/")[2]


def _numbers_of(system: System) -> dict[str, Any]:
    try:
        numbers = dict(system.statistics())
        json.dumps(numbers, default=str)
    except Exception as error:
        return {"error": _broken(error)}
    return numbers


def _tree_of(system: System) -> Tree | None:
    try:
        return system.tree()
    except Exception as error:
        log.warning("the tree() of a part failed: %s", describe(error))
        return None


def _broken(error: Exception) -> str:
    return f"the state of this part cannot be read: {describe(error)}"


def _with_health(tree: Tree, health: Mapping[str, Status], path: str = "") -> Tree:
    path = f"{path}/{tree.name}" if path else tree.name
    own = health.get(path, "active")
    state = own if tree.state == "running" and own != "active" else tree.state
    children = tuple(_with_health(child, health, path) for child in tree.children)
    return replace(tree, state=state, children=children)


def _kind(path: str) -> str:
    """Return the kind of a system: "manager" for "moored/postgres/manager"."""
    return path.rpartition("/")[2]


def _above(path: str) -> str:
    """Return the path of the part: "moored/postgres" for "moored/postgres/manager"."""
    return path.rpartition("/")[0]


def _part_of(path: str) -> str:
    """Return the part that a path belongs to: "postgres" for "moored/postgres/manager"."""
    return path.split("/")[1]
