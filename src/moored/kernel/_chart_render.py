"""A chart as a text table, and as a Mermaid diagram for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ._state import ANY, Rule, State

__all__ = ["mermaid", "table"]

Phases = Mapping[str, Sequence[str]]


def table(states: Sequence[State], phases: Phases, rules: Sequence[Rule]) -> str:
    """Return one line per source of moves: states in order, then whole phases, then any state."""
    targets: dict[str, list[str]] = {}
    for rule in rules:
        targets.setdefault(rule.source, []).append(str(rule.target))
    rows = [("from", "to")]
    for state in states:
        if str(state) in targets:
            rows.append((str(state), ", ".join(targets[str(state)])))
        elif not any(rule.covers(state) for rule in rules):
            rows.append((str(state), "nowhere: it ends here"))
    groups = [(f"any step of {phase}", phase) for phase in phases if len(phases[phase]) > 1]
    groups.append(("any state", ANY))
    rows += [(words, ", ".join(targets[source])) for words, source in groups if source in targets]
    width = max(len(source) for source, _ in rows)
    return "\n".join(f"{source:<{width}}  {target}" for source, target in rows)


def mermaid(initial: State, phases: Phases, rules: Sequence[Rule]) -> str:
    """Return a `stateDiagram-v2`: a box per phase, its steps inside, an arrow per move."""
    arrows = dict.fromkeys(arrow for rule in rules for arrow in _arrows(rule, phases))
    lines = ["stateDiagram-v2", f"    [*] --> {_step_id(initial)}"]
    for phase, steps in phases.items():
        lines += _box(phase, steps)
    lines += [f"    {source} --> {target}" for source, target in arrows]
    for phase, steps in phases.items():
        for state in (State(phase, step) for step in steps):
            if not any(rule.covers(state) for rule in rules):
                lines.append(f"    {_step_id(state)} --> [*]")
    return "\n".join(lines)


def _box(phase: str, steps: Sequence[str]) -> Iterator[str]:
    if len(steps) == 1:
        state = State(phase, steps[0])
        yield f'    state "{state}" as {_step_id(state)}'
        return
    yield f'    state "{phase}" as {_phase_id(phase)} {{'
    for step in steps:
        yield f'        state "{step}" as {_step_id(State(phase, step))}'
    yield "    }"


def _arrows(rule: Rule, phases: Phases) -> Iterator[tuple[str, str]]:
    target = _step_id(rule.target)
    for phase, steps in phases.items():
        covered = [state for state in (State(phase, step) for step in steps) if rule.covers(state)]
        # Mermaid cannot draw an arrow from a box to a step inside the same box.
        if len(covered) == len(steps) > 1 and phase != rule.target.phase:
            yield _phase_id(phase), target
        else:
            for state in covered:
                yield _step_id(state), target


def _step_id(state: State) -> str:
    return f"{_safe(state.phase)}__{_safe(state.step)}"


def _phase_id(phase: str) -> str:
    # Words such as "end" are Mermaid keywords; with a prefix they are not.
    return f"phase_{_safe(phase)}"


def _safe(name: str) -> str:
    return re.sub(r"\W", "_", name)
