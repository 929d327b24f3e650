"""What the page of one part or server shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moored.kernel import Event, Machine, Tree

from ._facts import facts_of
from ._graph import KINDS
from ._live import Live
from ._part import Part
from ._view import View

__all__ = ["PartPages"]

#: Events and outages that are shown, and steps: about those of one way to the present step.
SHOWN = 20
STEPS = 10
#: Events of all components in which those of one part are looked for.
SEARCHED = 1000


class PartPages:
    """The pages of all nodes of the map."""

    def __init__(self, view: View, live: Live, parts: Sequence[Part]) -> None:
        self._view = view
        self._live = live
        self._parts = {part.name: part for part in parts}

    def page(self, name: str) -> dict[str, Any] | None:
        """Return everything about one node; None if there is no such node."""
        graph = self._live.graph
        if (node := graph.nodes.get(name)) is None:
            return None
        part = self._parts.get(name)
        judged = self._live.judged(name)
        known = part is not None
        return {
            "name": name,
            "kind": node.what,
            "state": judged["state"],
            "fact": judged["fact"],
            "says": KINDS[node.kind].says,
            "needs": list(graph.needs[name]),
            "serves": list(graph.serves[name]),
            "facts": [list(each) for each in self._facts(name, node.kind)],
            "series": [each for each, of in self._live.sampler.series.items() if of.part == name],
            "outages": self._live.outages_of(name)[:SHOWN],
            "steps": [list(each) for each in self._steps(name)],
            "settings": [each._asdict() for each in part.settings()] if part is not None else [],
            "explain": self._view.explain(name)["explanation"] if known else judged["fact"],
            "tree": self._tree(name),
            "events": [[each.wall, _words(each)] for each in self._events(name)],
        }

    def _facts(self, name: str, kind: str) -> Iterator[tuple[str, str]]:
        for path, system in list(self._view.systems.items()):
            if path.split("/")[1] == name:
                try:
                    yield from facts_of(kind, system.statistics())
                except Exception:  # the explanation says what is wrong with it
                    continue

    def _steps(self, name: str) -> Iterator[tuple[float, str, float]]:
        """Yield the last states of the part's machines: since when, in words, and for how long."""
        clock = self._view.clock
        machines = [each for each, part in self._view.machines.items() if part == name]
        for machine in machines[:1]:  # the others have conditions of their own
            yield from _moves(machine, clock.monotonic(), clock.wall())

    def _tree(self, name: str) -> Mapping[str, Any]:
        trees = self._view.shown_tree().children
        found = next((each for each in trees if each.name == name), Tree(name, "unknown", 0.0))
        return found.as_dict()

    def _events(self, name: str) -> list[Event]:
        """Return what happened to a part, the newest first; its states are in the steps."""
        root = self._view.root().name
        own = {name, f"{root}/{name}"}
        found = [
            each
            for each in self._view.recorder.events(limit=SEARCHED)
            if each.component in own or each.component.startswith(f"{root}/{name}/")
            if each.kind != "state"
        ]
        return found[: -SHOWN - 1 : -1]


def _words(event: Event) -> str:
    """Return an event with its cause, without the identifiers of code."""
    text = event.text.replace("_", " ") if event.text.isidentifier() else event.text
    return ": ".join([text, *event.because[:1]])


def _moves(machine: Machine, now: float, wall: float) -> Iterator[tuple[float, str, float]]:
    words = machine.chart.words
    for move in machine.history[-STEPS + 1 :]:
        yield move.wall - move.lasted, words[move.source], move.lasted
    lasted = now - machine.since
    yield wall - lasted, words[machine.state], lasted
