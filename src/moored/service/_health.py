"""The health of the service: each part reports its own, and the worst one counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from moored.kernel import Condition
from moored.postgres import Health

__all__ = ["HTTP", "WORKING", "PartHealth", "Status", "worst"]

Status = Literal["active", "sleeping", "degraded", "waiting", "starting", "failed"]

#: The HTTP status of `/v1/health` for each state, from the best to the worst.
HTTP: Mapping[str, int] = {health.value: health.http for health in Health}
#: The states of a part that needs no attention.
WORKING: tuple[Status, ...] = ("active", "sleeping")
_ORDER: tuple[Status, ...] = ("active", "sleeping", "degraded", "waiting", "starting", "failed")


def worst(states: Iterable[Status]) -> Status:
    """Return the worst of these states; "active" if there are none."""
    return max(states, key=_ORDER.index, default="active")


class PartHealth:
    """The health of each part.

    A part that does not report its health is active while its conditions are met, and starting
    otherwise.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]], optional: Collection[str] = ()) -> None:
        """Take the names of the parts, each with its conditions, and those that may be down."""
        self._parts = parts
        self._optional = frozenset(optional)
        self._reported: dict[str, Status] = {}

    def conditions(self, part: str) -> Sequence[str]:
        """Return the names of the conditions of a part."""
        return self._parts[part]

    def report(self, part: str, state: Status) -> None:
        """Set the health of a part."""
        self._reported[part] = state

    def states(self, conditions: Mapping[str, Condition]) -> dict[str, Status]:
        """Return the health of each part."""
        return {part: self._state(part, conditions) for part in self._parts}

    def status(self, conditions: Mapping[str, Condition]) -> Status:
        """Return the worst health of all parts; an optional one makes it degraded at worst."""
        return worst(
            "degraded" if part in self._optional and HTTP[state] != 200 else state
            for part, state in self.states(conditions).items()
        )

    def ready(self, parts: Iterable[str], conditions: Mapping[str, Condition]) -> bool:
        """Whether `/v1/health` returns 200 for each of these parts."""
        states = self.states(conditions)
        return all(HTTP[states[part]] == 200 for part in parts)

    def _state(self, part: str, conditions: Mapping[str, Condition]) -> Status:
        met = all(conditions[name].met for name in self._parts[part])
        return self._reported.get(part, "active" if met else "starting")
