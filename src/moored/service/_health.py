"""One word for the whole service: each part says how it is, and the worst of it counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from moored.kernel import Condition
from moored.postgres import Health

__all__ = ["HTTP", "Board", "Status", "worst"]

Status = Literal["active", "sleeping", "degraded", "waiting", "starting", "failed"]

#: The answers of `/v1/health`, from the best word to the worst.
HTTP: Mapping[str, int] = {health.value: health.http for health in Health}
_ORDER: tuple[Status, ...] = ("active", "sleeping", "degraded", "waiting", "starting", "failed")


def worst(words: Iterable[Status]) -> Status:
    """The one that counts; without any, nothing is missing."""
    return max(words, key=_ORDER.index, default="active")


class Board:
    """What each part says of itself.

    A part that says nothing is active while its conditions are met, and starting otherwise.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        """Each part, with its conditions."""
        self._parts = parts
        self._said: dict[str, Status] = {}

    def say(self, part: str, word: Status) -> Sequence[str]:
        """A part says how it is; returns the conditions that go with it."""
        self._said[part] = word
        return self._parts[part]

    def words(self, conditions: Mapping[str, Condition]) -> dict[str, Status]:
        """How each part is."""
        return {part: self._word(part, conditions) for part in self._parts}

    def status(self, conditions: Mapping[str, Condition]) -> Status:
        """How all of them are, in one word."""
        return worst(self.words(conditions).values())

    def _word(self, part: str, conditions: Mapping[str, Condition]) -> Status:
        met = all(conditions[name].met for name in self._parts[part])
        return self._said.get(part, "active" if met else "starting")

    def __repr__(self) -> str:
        said = (f"{part} {self._said.get(part, 'by its conditions')}" for part in self._parts)
        return f"<Board: {', '.join(said)}>"
