"""The parts of a chart: states, their notation, and the moves between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

__all__ = ["ANY", "Moves", "Rule", "State", "StateLike", "pairs_of", "written"]

#: The source of a move that may be made from every state.
ANY = "*"


class State(NamedTuple):
    """The state of a machine: a phase, and a step within it.

    As text it is "phase/step", or "phase" alone for a phase without steps (its only step then has
    the name of the phase).
    """

    phase: str
    step: str

    def __str__(self) -> str:
        return self.phase if self.phase == self.step else f"{self.phase}/{self.step}"


#: A state in any notation: "phase/step", ("phase", "step"), or a phase alone. A phase alone means
#: all its steps as the source of a move, and its first step as the target.
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
        """Whether this move may be made from this state."""
        return self.source in (ANY, state.phase, str(state))


def written(state: StateLike) -> str:
    """Return the state as text, normalised: "active/active" is "active"."""
    text = state if isinstance(state, str) else "/".join(state)
    phase, _, step = text.partition("/")
    return phase if phase == step else text


def pairs_of(moves: Moves) -> Iterator[tuple[str, str]]:
    """Yield every declared move as two texts, from and to."""
    if not isinstance(moves, Mapping):
        for source, target in moves:
            yield written(source), written(target)
        return
    for source, targets in moves.items():
        several = (targets,) if isinstance(targets, (str, State)) else targets
        for target in several:
            yield written(source), written(target)
