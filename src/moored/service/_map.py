"""The map: the nodes as they are drawn, with stacks of alike parts, and the flows between them.

Six or more alike parts are one stack; those that do not work leave it, unless most of them do not.
What would not fit is stacked by kind, so that at most `MAX_LAYERS` x `MAX_ROWS` nodes are drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._graph import KINDS, Graph, Node
from ._layout import MAX_ROWS, Layout, layout, ranks

__all__ = ["Map", "Maps", "Unit"]

#: The least number of alike parts that are one stack.
STACKED = 6
#: How many parts that do not work leave a stack as nodes of their own.
SHOWN = 4

#: The number in which the flow to or from a part of this kind is measured.
FLOWS = {
    "pool": "checkouts",
    "stream": "changes",
    "channel": "calls",
    "sessions": "sent",
    "broker": "delivered",
    "consumer": "handled",
}
#: The kinds whose parts get data from what they need.
READERS = ("stream", "consumer", "broker", "browsers")


@dataclass(frozen=True)
class Unit:
    """What is drawn as one node: a node of the graph, or several."""

    id: str
    members: tuple[Node, ...]
    #: Its members do not work, and there is no room for each.
    rest: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it stands for several nodes."""
        return len(self.members) > 1 or self.rest

    @property
    def name(self) -> str:
        """Its name on the map, such as "37 consumers"."""
        if not self.is_stack:
            return self.members[0].id
        if self.rest:
            return f"+ {len(self.members)} more"
        return f"{len(self.members)} {_several(self.members)}"


@dataclass(frozen=True)
class Map:
    """What is drawn where, and what flows between."""

    units: Mapping[str, Unit]
    needs: Mapping[str, Sequence[str]]
    layout: Layout
    graph: Graph
    #: The unit of each node of the graph.
    unit_of: Mapping[str, str]

    def as_dict(self, series: Collection[str], mains: Mapping[str, str]) -> dict[str, Any]:
        """Return the map for the page.

        :param series: the names of the series that are recorded.
        :param mains: the series of the main number of each part.
        """
        return {
            "layers": self.layout.layers,
            "rows": self.layout.rows,
            "nodes": [self._node(unit, mains) for unit in self.units.values()],
            "edges": [
                self._edge(user, needed, series)
                for user in self.units
                for needed in self.needs[user]
                if self.layout.layer[user] != self.layout.layer[needed]
            ],
            "lanes": self.lanes(),
        }

    def lanes(self) -> list[list[str]]:
        """Return the parts and servers by server: a server, then what needs it, and so on."""
        drawn, groups = self.layout, []
        # As they are on the map, but from the right.
        left = sorted(
            (each for each in self.units.values() if each.members[0].role != "outside"),
            key=lambda each: (-drawn.layer[each.id], drawn.place[each.id]),
        )
        while left:
            group, more = list[str](), left[:1]
            while more:
                if (unit := more.pop(0)) in left:
                    left.remove(unit)
                    group += [node.id for node in unit.members]
                    more[:0] = [user for user in left if unit.id in self.needs[user.id]]
            groups.append(group)
        return groups

    def _node(self, unit: Unit, mains: Mapping[str, str]) -> dict[str, Any]:
        first = unit.members[0]
        return {
            "id": unit.id,
            "name": unit.name,
            "kind": _several(unit.members) if unit.is_stack else first.what,
            "role": first.role,
            "runs": None if unit.is_stack else first.runs,
            "needs": list(self.needs[unit.id]),
            "layer": self.layout.layer[unit.id],
            "place": self.layout.place[unit.id],
            "stack": [each.id for each in unit.members] if unit.is_stack else None,
            "main": None if unit.is_stack else mains.get(unit.id),
        }

    def _edge(self, user: str, needed: str, series: Collection[str]) -> dict[str, Any]:
        reads = self._reads(user, needed)
        one, other = (needed, user) if reads else (user, needed)
        via = self.layout.via.get((user, needed), ())
        flow = self._flow(user, needed)
        return {
            "from": one,
            "to": other,
            "flow": flow if flow in series else None,
            "unit": "/s",
            "via": list(reversed(via) if reads else via),
        }

    def _reads(self, user: str, needed: str) -> bool:
        """Whether data goes from what is needed to the one that needs it."""
        kinds = (self.units[each].members[0].kind for each in (user, needed))
        of_user, of_needed = kinds
        return of_user in READERS or of_needed in ("stream", "broker")

    def _flow(self, user: str, needed: str) -> str | None:
        """Return the series of what flows between two units, if it is known."""
        one, other = self.units[user], self.units[needed]
        if one.is_stack or other.is_stack:
            return None
        kind, of = one.members[0].kind, other.members[0].kind
        if kind == "broker" and of == "stream":
            return f"{user}.events"
        if kind in FLOWS:
            return f"{user}.{FLOWS[kind]}"
        # Of a number that several users share, the part of each is unknown.
        alone = list(self.graph.serves[needed]) == [user]
        return f"{needed}.{FLOWS[of]}" if of in FLOWS and alone else None


class Maps:
    """The maps of one graph: which nodes are stacked is decided once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._place = {name: number for number, name in enumerate(graph.nodes)}
        roles = {name: node.role for name, node in graph.nodes.items()}
        self._rank = ranks(roles, graph.needs)
        columns: dict[int, list[Unit]] = {}
        for unit in _alike(graph, self._rank):
            columns.setdefault(self._rank[unit.members[0].id], []).append(unit)
        self._columns = [_fitting(column) for column in columns.values()]
        #: The nodes that are stacked: the map depends on these alone.
        self.stacked = frozenset(
            node.id
            for column in self._columns
            for unit in column
            if unit.is_stack
            for node in unit.members
        )

    def map(self, bad: Collection[str] = ()) -> Map:
        """Return the map; the nodes in `bad` do not work, and leave their stacks."""
        found = self.stacked.intersection(bad)
        units = [unit for column in self._columns for unit in _left(column, found)]
        units.sort(key=lambda unit: (self._place[unit.members[0].id], unit.id))
        unit_of = {node.id: unit.id for unit in units for node in unit.members}
        order = {unit.id: number for number, unit in enumerate(units)}
        needs = {
            unit.id: sorted(
                {unit_of[each] for node in unit.members for each in self.graph.needs[node.id]}
                - {unit.id},
                key=order.__getitem__,
            )
            for unit in units
        }
        roles = {unit.id: unit.members[0].role for unit in units}
        drawn = layout(roles, needs, {unit.id: self._rank[unit.members[0].id] for unit in units})
        return Map({unit.id: unit for unit in units}, needs, drawn, self.graph, unit_of)


def _alike(graph: Graph, rank: Mapping[str, int]) -> Iterator[Unit]:
    """Yield the nodes, and stacks of alike ones: of a kind, with the same nodes on both sides.

    Each may have a server of its own; those are alike if their users are.
    """

    def needs(name: str) -> Iterator[str | tuple[str, str]]:
        for each in graph.needs[name]:
            own = graph.nodes[each].role == "server" and len(graph.serves[each]) == 1
            yield (graph.nodes[each].what, "") if own else each

    unit_of: dict[str, str] = {}
    servers = [name for name, node in graph.nodes.items() if node.role == "server"]
    others = [name for name, node in graph.nodes.items() if node.role != "server"]
    for names in (others, servers):
        groups: dict[Any, list[Node]] = {}
        for name in names:
            users = frozenset(unit_of.get(each, each) for each in graph.serves[name])
            node = graph.nodes[name]
            key = node.role, node.kind, node.what, rank[name], frozenset(needs(name)), users
            groups.setdefault(key, []).append(node)
        for found in groups.values():
            for unit in [_stack(found)] if len(found) >= STACKED else map(_one, found):
                unit_of |= dict.fromkeys((node.id for node in unit.members), unit.id)
                yield unit


def _fitting(column: Sequence[Unit]) -> Sequence[Unit]:
    """Stack the units of a layer by kind, the most frequent kind first, until they fit."""
    while len(column) > MAX_ROWS:
        kinds: dict[tuple[str, str], list[Unit]] = {}
        for unit in column:
            kinds.setdefault((unit.members[0].kind, unit.members[0].what), []).append(unit)
        most = max(kinds.values(), key=len)
        if len(most) == 1:
            most = list(column[MAX_ROWS - 1 :])
        members = [node for unit in most for node in unit.members]
        stacked = {unit.id for unit in most}
        column = [*(unit for unit in column if unit.id not in stacked), _stack(members)]
    return column


def _left(column: Sequence[Unit], bad: Collection[str]) -> Iterator[Unit]:
    """Yield the units of a layer after those in `bad` have left their stacks, if there is room."""
    room = MAX_ROWS - len(column)
    for unit in column:
        leaving = [node for node in unit.members if node.id in bad]
        number = len(leaving) if len(leaving) <= min(SHOWN, room) else min(SHOWN, room - 1)
        if not unit.is_stack or 2 * len(leaving) > len(unit.members) or number < 1:
            yield unit
            continue
        left = {node.id for node in leaving}
        yield replace(unit, members=tuple(each for each in unit.members if each.id not in left))
        yield from map(_one, leaving[:number])
        room -= number
        if more := tuple(leaving[number:]):
            yield Unit(f"+{unit.id}", more, rest=True)
            room -= 1


def _one(node: Node) -> Unit:
    return Unit(node.id, (node,))


def _stack(members: Sequence[Node]) -> Unit:
    return Unit(f"+{members[0].id}", tuple(members))


def _several(nodes: Iterable[Node]) -> str:
    """Return what several nodes are, in words."""
    found = {(node.kind, node.what): node for node in nodes}
    if len(found) > 1:
        roles = {node.role for node in found.values()}
        return "servers" if roles == {"server"} else "parts"
    ((kind, what),) = found
    if kind == "server":
        return what if what.endswith("s") else f"{what}s" if "server" in what else f"{what} servers"
    return KINDS[kind].words if what == KINDS[kind].word else f"{what}s"
