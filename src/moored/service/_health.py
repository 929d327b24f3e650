"""The health of the service: each part reports its own, and the worst one counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from moored.kernel import Condition
from moored.postgres import Health

__all__ = ["HTTP", "READY_STATES", "WORKING", "PartHealth", "Status", "probe", "worst"]

Status = Literal["active", "sleeping", "degraded", "waiting", "starting", "failed"]

#: The HTTP status of `/v1/health` for each state, from the best to the worst.
HTTP: Mapping[str, int] = {health.value: health.http for health in Health}
#: The states of a part that needs no attention. One that is "waiting" stands by: another instance
#: has the lock of its stream.
WORKING: tuple[Status, ...] = ("active", "sleeping", "waiting")
#: The states of a service that should get requests: `/v1/health?ready` returns 200.
READY_STATES: tuple[Status, ...] = (*WORKING, "degraded")


def probe(asked: Collection[str], status: Status, *, started: bool) -> int:
    """Return the HTTP status for `?ready`, `?started` or `?live`; without one, for the state.

    A live process answers: that depends on nothing else, because a restart mends no database.
    """
    if "ready" in asked:
        return 200 if status in READY_STATES else 503
    if "started" in asked:
        return 200 if started else 503
    return 200 if "live" in asked else HTTP[status]


def worst(states: Iterable[Status]) -> Status:
    """Return the worst of these states; "active" if there are none."""
    return max(states, key=list(HTTP).index, default="active")


class PartHealth:
    """The health of each part.

    A part that does not report its health is active while its conditions are met, and starting
    otherwise.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]], optional: Collection[str] = ()) -> None:
        """Take the names of the parts, each with its conditions, and those that may be down."""
        self._parts = parts
        self._optional = frozenset(optional)
        self._reported: dict[str, tuple[Status, float]] = {}

    @property
    def names(self) -> Collection[str]:
        """The names of the parts, in their order."""
        return self._parts.keys()

    @property
    def required(self) -> Collection[str]:
        """The parts without which the service is not ready."""
        return [part for part in self._parts if part not in self._optional]

    def conditions(self, part: str) -> Sequence[str]:
        """Return the names of the conditions of a part."""
        return self._parts[part]

    def says(self, part: str) -> bool:
        """Whether a part reports its health, or has conditions."""
        return part in self._reported or bool(self._parts[part])

    def report(self, part: str, state: Status, now: float = 0.0) -> None:
        """Set the health of a part."""
        if part not in self._reported or self._reported[part][0] != state:
            self._reported[part] = state, now

    def since(self, part: str, conditions: Mapping[str, Condition]) -> float:
        """Return when a part has entered its present health, in monotonic seconds."""
        if part in self._reported:
            return self._reported[part][1]
        return max((conditions[name].since for name in self._parts[part]), default=0.0)

    def states(self, conditions: Mapping[str, Condition]) -> dict[str, Status]:
        """Return the health of each part."""
        return {part: self._state(part, conditions) for part in self._parts}

    def status(self, conditions: Mapping[str, Condition]) -> Status:
        """Return the worst effect of all parts."""
        return worst(self.effect(part, state) for part, state in self.states(conditions).items())

    def effect(self, part: str, state: Status) -> Status:
        """Return what this health of a part makes the service; at worst degraded if optional."""
        return "degraded" if part in self._optional and state not in READY_STATES else state

    def worst_of(self, parts: Iterable[str], conditions: Mapping[str, Condition]) -> Status:
        """Return the worst health of these parts."""
        return worst(self._state(part, conditions) for part in parts)

    def _state(self, part: str, conditions: Mapping[str, Condition]) -> Status:
        if (reported := self._reported.get(part)) is not None:
            return reported[0]
        met = all(conditions[name].met for name in self._parts[part])
        return "active" if met else "starting"
