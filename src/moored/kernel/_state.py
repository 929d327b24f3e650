"""The vocabulary of charts: states, how people write them, and moves between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

__all__ = ["ANY", "Moves", "Rule", "State", "StateLike", "pairs_of", "written"]

#: The source of a move that may be made from every state.
ANY = "*"


class State(NamedTuple):
    """Where a machine is: a phase, and a step within it.

    As text it is "phase/step", or "phase" alone for a phase that has no steps of its own (its
    one step is then called like the phase).
    """

    phase: str
    step: str

    def __str__(self) -> str:
        return self.phase if self.phase == self.step else f"{self.phase}/{self.step}"


#: A state as people write it: "phase/step", ("phase", "step"), or a phase alone. A phase alone
#: means all its steps where a move starts, and its first step where a move ends.
StateLike: TypeAlias = State | tuple[str, str] | str
#: Pairs of (from, to), or a mapping from each source to its target or its targets.
Moves: TypeAlias = (
    Mapping[str, StateLike | Iterable[StateLike]] | Iterable[tuple[StateLike, StateLike]]
)


class Rule(NamedTuple):
    """One declared move: from a state, from any step of a phase, or from anywhere."""

    source: str
    target: State

    def covers(self, state: State) -> bool:
        """Whether it lets a machine move away from this state."""
        return self.source in (ANY, state.phase, str(state))


def written(state: StateLike) -> str:
    """The state as text, each in one way only: "active/active" is "active"."""
    text = state if isinstance(state, str) else "/".join(state)
    phase, _, step = text.partition("/")
    return phase if phase == step else text


def pairs_of(moves: Moves) -> Iterator[tuple[str, str]]:
    """Every declared move as text, from and to."""
    if not isinstance(moves, Mapping):
        for source, target in moves:
            yield written(source), written(target)
        return
    for source, targets in moves.items():
        several = (targets,) if isinstance(targets, (str, State)) else targets
        for target in several:
            yield written(source), written(target)
