"""Everything that the service knows about itself: for the status, the page and the metrics."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import moored
from moored.kernel import Clock, Machine, Recorder, StatusMonitor, Tree

from ._health import Board, Status
from ._part import System

__all__ = ["View", "find_component", "grafted"]

#: Events in a full state: enough to see what led here, little enough to send at every change.
RECENT = 50


def find_component(wanted: str, known: Iterable[str]) -> list[str]:
    """The components that a person may mean: the one of that name, or those that end with it."""
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
    """What there is to see. It reads, and changes nothing."""

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
    _began: float = field(init=False)
    _began_wall: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock.monotonic()
        self._began_wall = self.clock.wall()

    @property
    def status(self) -> Status:
        """How all parts are, in one word."""
        return self.monitor.status()

    def words(self) -> dict[str, Status]:
        """How each part is, in one word."""
        return self.board.words(self.monitor.conditions())

    def tree(self) -> Tree:
        """The supervision tree, with those that the parts have of their own."""
        return grafted(self.root(), {path: each.tree() for path, each in self.systems.items()})

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
            **{_part_of(path): dict(each.statistics()) for path, each in self.systems.items()},
            "tree": self.tree().as_dict(),
            "events": [event.as_dict() for event in self.recorder.events(limit=RECENT)],
        }

    def components(self) -> tuple[str, ...]:
        """Everything that can be explained."""
        named = {path.rpartition("/")[0] for path in self.systems}
        return tuple(sorted({*self.recorder.components(), *named}))

    def explain(self, component: str) -> dict[str, Any]:
        """One component: why it is as it is, in words and as events."""
        return {
            "component": component,
            "explanation": self._explanation(component),
            "events": [event.as_dict() for event in self.recorder.events(component, limit=RECENT)],
        }

    def _explanation(self, component: str) -> str:
        for path, system in self.systems.items():
            if component in (path.rpartition("/")[0], _part_of(path)):
                return system.explain()
        return self.recorder.explain(component)


def _part_of(path: str) -> str:
    """The part that a path belongs to: "postgres" for "moored/postgres/manager"."""
    return path.split("/")[1]
