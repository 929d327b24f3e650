"""The chart of a state machine: its phases, the steps of each, and the legal moves.

Charts are module constants, so that the documentation draws the same declaration that the running
machine obeys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from ._chart_render import mermaid, table
from ._state import ANY, Moves, Rule, State, StateLike, pairs_of, written
from ._words import refuse

__all__ = ["Chart"]


class Chart:
    """Phases with their steps in order, the legal moves between them, and the initial state.

    A phase with no steps, such as `"active": ()`, is a state by itself. A move from a whole
    phase, or from `"*"`, is meant for restarts and failures: it may be made from each of those
    states, the target itself included. States that are not declared, or cannot be
    reached, are reported all at once.

    `words` describes steps for people: it maps a step's name to a text such as "dialing the
    server".
    """

    def __init__(
        self,
        *,
        phases: Mapping[str, Sequence[str]],
        moves: Moves,
        initial: StateLike,
        words: Mapping[str, str] | None = None,
    ) -> None:
        self.phases: Mapping[str, tuple[str, ...]] = {
            phase: tuple(steps) or (phase,) for phase, steps in phases.items()
        }
        self.states = tuple(State(phase, step) for phase in phases for step in self.phases[phase])
        pairs = list(pairs_of(moves))
        refuse("Chart", self._undeclared(pairs, written(initial)))
        self.initial = self._entered(written(initial))
        self.rules = tuple(Rule(self._left(source), self._entered(to)) for source, to in pairs)
        # One object for each state, shared by all machines and moves.
        self._named = {phase: State(phase, steps[0]) for phase, steps in self.phases.items()}
        self._named.update((str(state), state) for state in self.states)
        # Likewise shared: the text and the data that a machine records when it enters a state.
        given = words or {}
        self.words = {state: given.get(state.step, _named(state)) for state in self.states}
        self._recorded = {
            state: (
                self.words[state] if state.step in given else f"at {self.words[state]}",
                MappingProxyType({"phase": state.phase, "step": state.step}),
            )
            for state in self.states
        }
        self._legal = {state: self._targets_of(state) for state in self.states}
        # The states that each name stands for: a phase, a step, or "phase/step".
        self._states_at: dict[str, set[State]] = {}
        for state in self.states:
            for name in (state.phase, state.step, str(state)):
                self._states_at.setdefault(name, set()).add(state)
        refuse("Chart", self._unreachable())

    def find(self, state: StateLike) -> State | None:
        """Return the state with this name, or None."""
        return self._named.get(written(state))

    def at(self, state: State, *names: str) -> bool:
        """Whether one of these names stands for the state: its phase, its step or "phase/step".

        A step's name stands for that step in every phase.

        :raises ValueError: a name is not declared, so that the comparison would never hold.
        """
        found = False
        for name in names:
            if name not in self._states_at:
                refuse("Chart", [f"{name!r} is not a declared phase, step or state: {self!r}"])
            found |= state in self._states_at[name]
        return found

    def legal(self, state: State) -> tuple[State, ...]:
        """Return the states that may follow this one."""
        return self._legal[state]

    def text(self) -> str:
        """Return the legal moves as a text table."""
        return table(self.states, self.phases, self.rules)

    def mermaid(self) -> str:
        """Return the chart as a Mermaid state diagram."""
        return mermaid(self.initial, self.phases, self.rules)

    def __repr__(self) -> str:
        return (
            f"<Chart: {len(self.phases)} phases, {len(self.states)} states, "
            f"{len(self.rules)} moves, from {self.initial}>"
        )

    def _known(self, text: str) -> bool:
        phase, slash, step = text.partition("/")
        return phase in self.phases and (not slash or step in self.phases[phase])

    def _entered(self, text: str) -> State:
        phase, _, step = text.partition("/")
        return State(phase, step or self.phases[phase][0])

    def _left(self, text: str) -> str:
        # A phase with one step is a single state, not a group of states.
        single = len(self.phases.get(text, ())) == 1
        return str(self._entered(text)) if single else text

    def _targets_of(self, state: State) -> tuple[State, ...]:
        return tuple(dict.fromkeys(rule.target for rule in self.rules if rule.covers(state)))

    def _undeclared(self, pairs: list[tuple[str, str]], initial: str) -> Iterator[str]:
        sources = (source for source, _ in pairs if source != ANY)
        for name in dict.fromkeys((initial, *sources, *(target for _, target in pairs))):
            if not self._known(name):
                yield f"{name!r} is not a declared state"

    def _unreachable(self) -> Iterator[str]:
        reached, fresh = {self.initial}, [self.initial]
        while fresh:
            following = set(self._legal[fresh.pop()]) - reached
            reached |= following
            fresh.extend(following)
        for state in self.states:
            if state not in reached:
                yield f"{str(state)!r} can never be reached from {str(self.initial)!r}"


def _named(state: State) -> str:
    phase, step = state
    return phase if phase == step else f"{phase} / {step}"
