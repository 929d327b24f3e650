"""The health of the service: each part reports its own, and the worst one counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from moored.kernel import Condition
from moored.postgres import Health

__all__ = ["HTTP", "Board", "Status", "worst"]

Status = Literal["active", "sleeping", "degraded", "waiting", "starting", "failed"]

#: The HTTP status of `/v1/health` for each state, from the best to the worst.
HTTP: Mapping[str, int] = {health.value: health.http for health in Health}
_ORDER: tuple[Status, ...] = ("active", "sleeping", "degraded", "waiting", "starting", "failed")


def worst(words: Iterable[Status]) -> Status:
    """The worst of these states; "active" when there are none."""
    return max(words, key=_ORDER.index, default="active")


class Board:
    """The health of each part.

    A part that reports none is active while its conditions are met, and starting otherwise.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Take the names of the parts, each with its conditions."""
        self._parts = parts
        self._said: dict[str, Status] = {}

    def say(self, part: str, word: Status) -> Sequence[str]:
        """Set the health of a part; return the names of its conditions."""
        self._said[part] = word
        return self._parts[part]

    def words(self, conditions: Mapping[str, Condition]) -> dict[str, Status]:
        """The health of each part."""
        return {part: self._word(part, conditions) for part in self._parts}

    def status(self, conditions: Mapping[str, Condition]) -> Status:
        """The worst health of all parts."""
        return worst(self.words(conditions).values())

    def _word(self, part: str, conditions: Mapping[str, Condition]) -> Status:
        met = all(conditions[name].met for name in self._parts[part])
        return self._said.get(part, "active" if met else "starting")

    def __repr__(self) -> str:
        said = (f"{part} {self._said.get(part, 'by its conditions')}" for part in self._parts)
        return f"<Board: {', '.join(said)}>"
