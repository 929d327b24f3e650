"""The state of the whole service, for the status, the page and the metrics."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import moored
from moored.kernel import Clock, Machine, Recorder, StatusMonitor, Tree, describe

from ._health import Board, Status
from ._part import System

__all__ = ["View", "find_component", "grafted"]

log = logging.getLogger("moored.service")

#: Events in a full state: enough to see what led here, little enough to send at every change.
RECENT = 50


def find_component(wanted: str, known: Iterable[str]) -> list[str]:
    """The component with this path, or else those whose path ends with it."""
    names = sorted(set(known))
    wanted = wanted.strip("/")
    if wanted in names:
        return [wanted]
    return [name for name in names if name.endswith(f"/{wanted}")]


def grafted(tree: Tree, others: Mapping[str, Tree], path: str = "") -> Tree:
    """A tree with others put in below the nodes with these paths."""
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
    board: Board
    recorder: Recorder
    clock: Clock
    machines: Sequence[Machine] = ()
    #: What the parts show of themselves, by the path of the child that runs it.
    systems: Mapping[str, System] = field(default_factory=dict)
    #: Where the service is reached, once that is known.
    address: str = ""
    #: The last outage of a part, in lines of an explanation.
    outage_of: Callable[[str], Iterable[str]] = lambda part: ()
    _began: float = field(init=False)
    _began_wall: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock.monotonic()
        self._began_wall = self.clock.wall()

    @property
    def status(self) -> Status:
        """The health of the service: the worst of its parts."""
        return self.monitor.status()

    def words(self) -> dict[str, Status]:
        """The health of each part."""
        return self.board.words(self.monitor.conditions())

    def tree(self) -> Tree:
        """The supervision tree, with those that the parts have of their own."""
        return grafted(self.root(), self._trees())

    def shown_tree(self) -> Tree:
        """The same tree, with the health of a part instead of "running" where it is not active.

        A child may run and wait for a server that is away; so the root, each part and each child
        that runs a system have the health of the part instead of "running".
        """
        tree = self.tree()
        words = {f"{tree.name}/{part}": word for part, word in self.words().items()}
        words |= {path: words[part] for path in self.systems if (part := _above(path)) in words}
        return _with_health(tree, {tree.name: self.status, **words})

    def _trees(self) -> dict[str, Tree]:
        return {path: tree for path, each in self.systems.items() if (tree := _tree_of(each))}

    @property
    def uptime(self) -> float:
        """Seconds since the service began to start."""
        return self.clock.monotonic() - self._began

    def whole(self) -> dict[str, Any]:
        """The whole state as plain data."""
        return {
            "status": self.status,
            "parts": self.words(),
            "version": moored.__version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "address": self.address,
            "started_at": self._began_wall,
            "uptime": self.uptime,
            "conditions": self.monitor.as_dict()["conditions"],
            "machines": [machine.as_dict() for machine in self.machines],
            **{self._label(path): _numbers_of(each) for path, each in self.systems.items()},
            "tree": self.shown_tree().as_dict(),
            "events": [event.as_dict() for event in self.recorder.events(limit=RECENT)],
        }

    def components(self) -> tuple[str, ...]:
        """Everything that can be explained: the paths of the tree, and what else is recorded."""
        paths = self._paths()
        others = {name for path, name in paths.items() if path != name}
        return tuple(sorted({*paths, *self.recorder.components()} - others))

    def find(self, wanted: str) -> list[str]:
        """The component with this path or name, or else those whose path ends with it."""
        wanted = wanted.strip("/")
        exact = wanted in self.recorder.components() or wanted in map(_part_of, self.systems)
        return [wanted] if exact else find_component(wanted, self.components())

    def explain(self, component: str) -> dict[str, Any]:
        """Why a component is in its present state, as text and as events."""
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
                    told = system.explain()
                except Exception as error:
                    told = f"{_broken(error)}\n{self.recorder.explain(recorded)}"
                if "\n  before " in told:
                    return told  # the system knows more of it
                return "\n".join([told, *self.outage_of(_part_of(path))])
        return "\n".join([self.recorder.explain(recorded), *self._outages_around(component)])

    def _outages_around(self, component: str) -> Iterator[str]:
        """The last outage of each part whose system is above or below this path of the tree."""
        for part in {
            _part_of(path)
            for path in self.systems
            if path.startswith(f"{component}/") or component.startswith(f"{path}/")
        }:
            yield from self.outage_of(part)

    def _paths(self) -> dict[str, str]:
        """The paths of the tree, each with the component that its events are recorded under."""
        paths = {path: path for path, _ in self.root().paths()}
        for path, tree in self._trees().items():
            for inner, _ in tree.paths():
                below = inner.removeprefix(tree.name)
                if below:
                    paths[path + below] = inner
        return paths

    def _label(self, path: str) -> str:
        """The key of a system in the status: its part, or more of its path if that has several."""
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
        log.warning("the supervision tree of a part cannot be read: %s", describe(error))
        return None


def _broken(error: Exception) -> str:
    return f"the state of this part cannot be read: {describe(error)}"


def _with_health(tree: Tree, words: Mapping[str, Status], path: str = "") -> Tree:
    path = f"{path}/{tree.name}" if path else tree.name
    word = words.get(path, "active")
    state = word if tree.state == "running" and word != "active" else tree.state
    children = tuple(_with_health(child, words, path) for child in tree.children)
    return replace(tree, state=state, children=children)


def _above(path: str) -> str:
    """The path of the part: "moored/postgres" for "moored/postgres/manager"."""
    return path.rpartition("/")[0]


def _part_of(path: str) -> str:
    """The part that a path belongs to: "postgres" for "moored/postgres/manager"."""
    return path.split("/")[1]
