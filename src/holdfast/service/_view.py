"""Everything that the service knows about itself: for the status, the page and the metrics."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import holdfast
from holdfast.kernel import Clock, Condition, Machine, Recorder, StatusMonitor, Tree

__all__ = ["Status", "View", "find_component", "status_of"]

Status = Literal["active", "starting"]

#: Events in a full state: enough to see what led here, little enough to send at every change.
RECENT = 50


def status_of(conditions: Mapping[str, Condition]) -> Status:
    """The service is active while every condition is met; otherwise it is on its way there."""
    return "active" if all(condition.met for condition in conditions.values()) else "starting"


def find_component(wanted: str, known: Iterable[str]) -> list[str]:
    """The components that a person may mean: the one of that name, or those that end with it."""
    names = sorted(set(known))
    wanted = wanted.strip("/")
    if wanted in names:
        return [wanted]
    return [name for name in names if name.endswith(f"/{wanted}")]


@dataclass
class View:
    """What there is to see. It reads, and changes nothing."""

    tree: Callable[[], Tree]
    monitor: StatusMonitor[Status]
    recorder: Recorder
    clock: Clock
    machines: Sequence[Machine] = ()
    #: Where the service is reached, once that is known.
    address: str = ""
    _began: float = field(init=False)
    _began_wall: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock.monotonic()
        self._began_wall = self.clock.wall()

    @property
    def status(self) -> Status:
        """Active or starting."""
        return self.monitor.status()

    @property
    def uptime(self) -> float:
        """Seconds since the service began to start."""
        return self.clock.monotonic() - self._began

    def whole(self) -> dict[str, Any]:
        """The whole state as plain data."""
        return {
            "status": self.status,
            "version": holdfast.__version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "address": self.address,
            "started_at": self._began_wall,
            "uptime": self.uptime,
            "conditions": self.monitor.as_dict()["conditions"],
            "machines": [machine.as_dict() for machine in self.machines],
            "tree": self.tree().as_dict(),
            "events": [event.as_dict() for event in self.recorder.events(limit=RECENT)],
        }

    def components(self) -> tuple[str, ...]:
        """Everything that can be explained."""
        return tuple(sorted(self.recorder.components()))

    def explain(self, component: str) -> dict[str, Any]:
        """One component: why it is as it is, in words and as events."""
        return {
            "component": component,
            "explanation": self.recorder.explain(component),
            "events": [event.as_dict() for event in self.recorder.events(component, limit=RECENT)],
        }
