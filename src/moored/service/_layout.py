"""Where the nodes of the map are drawn: layers and places, from what needs what.

The rank of a node is the longest way from it to a server. Servers are in the last layer, those who
listen in the first, and all parts between them. An edge over several layers gets an invisible slot
in each layer between. Sweeps then move each node to the mean place of its neighbours, and nodes
with the same mean keep the order in which they are given, so the same input always gives the same
picture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

__all__ = ["MAX_LAYERS", "MAX_ROWS", "Layout", "Role", "deepest_first", "layout", "ranks"]

Role = Literal["part", "server", "outside"]

MAX_LAYERS = 6
MAX_ROWS = 8
SWEEPS = 3

#: An invisible slot: the node that its edges lead to, and its layer.
_Slot = tuple[str, int]


class Layout(NamedTuple):
    """The layer and the place of each node, and the slots of long edges."""

    layers: int
    rows: int
    layer: Mapping[str, int]
    #: The row of the centre of each node: 1.5 is the middle of four rows.
    place: Mapping[str, float]
    #: The slots of an edge over several layers, as layer and place, by its two nodes.
    via: Mapping[tuple[str, str], Sequence[tuple[int, float]]]


def ranks(roles: Mapping[str, Role], needs: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Return how far each node is from the servers; `needs` has no cycles.

    Ranks beyond `MAX_LAYERS` are cut off.
    """
    servers = int("server" in roles.values())
    outside = int("outside" in roles.values())
    most = MAX_LAYERS - 1 - outside
    found = {node: 0 for node, role in roles.items() if role == "server"}
    for node in deepest_first(roles, needs):
        if roles[node] == "part":
            below = (found[each] for each in needs.get(node, ()) if roles[each] != "outside")
            found[node] = min(most, max(below, default=servers - 1) + 1)
            found[node] = max(found[node], servers)
    highest = max(found.values(), default=-1)
    return found | {node: highest + 1 for node, role in roles.items() if role == "outside"}


def layout(
    roles: Mapping[str, Role], needs: Mapping[str, Collection[str]], rank: Mapping[str, int]
) -> Layout:
    """Return where each node is drawn; edges within a layer, and those of servers, have no say."""
    count = max(rank.values(), default=-1) + 1
    layer = {node: count - 1 - each for node, each in rank.items()}
    columns: list[list[str | _Slot]] = [[] for _ in range(count)]
    for node in roles:
        columns[layer[node]].append(node)
    beside: dict[str | _Slot, list[str | _Slot]] = {}
    ways: dict[tuple[str, str], list[_Slot]] = {}
    for node, role in roles.items():
        if role == "server":
            continue
        for needed in needs.get(node, ()):
            if layer[needed] > layer[node]:
                way = _way(node, needed, layer, columns)
                ways[node, needed] = way
                stations: list[str | _Slot] = [node, *way, needed]
                for one, other in pairwise(stations):
                    beside.setdefault(one, []).append(other)
                    beside.setdefault(other, []).append(one)
    for turn in range(SWEEPS):
        _sweep(columns[:: 1 if turn % 2 else -1], columns, beside)
    rows = max(map(len, columns), default=0)
    place = {
        each: (number + 0.5) * rows / len(column) - 0.5
        for column in columns
        for number, each in enumerate(column)
    }
    return Layout(
        count,
        rows,
        layer,
        {node: place[node] for node in roles},
        {edge: [(slot[1], place[slot]) for slot in way] for edge, way in ways.items() if way},
    )


def _way(
    node: str, needed: str, layer: Mapping[str, int], columns: Sequence[list[str | _Slot]]
) -> list[_Slot]:
    """Return the slots of an edge; edges to the same node share theirs, and a full layer has none.

    Without one slot the line is straight there, and may touch a node.
    """
    way: list[_Slot] = []
    for between in range(layer[node] + 1, layer[needed]):
        slot, column = (needed, between), columns[between]
        if slot not in column:
            if len(column) >= MAX_ROWS:
                continue
            column.append(slot)
        way.append(slot)
    return way


def _sweep(
    order: Iterable[list[str | _Slot]],
    columns: Sequence[list[str | _Slot]],
    beside: Mapping[str | _Slot, Sequence[str | _Slot]],
) -> None:
    place: dict[str | _Slot, float] = {}
    for column in columns:
        _spread(column, place)

    def mean(each: str | _Slot) -> float:
        near = beside.get(each)
        return sum(map(place.__getitem__, near)) / len(near) if near else place[each]

    for column in order:
        # Rounded, so that equal means are equal whatever the order of their sum.
        column.sort(key=lambda each: round(mean(each), 9))
        _spread(column, place)


def _spread(column: Sequence[str | _Slot], place: dict[str | _Slot, float]) -> None:
    for number, each in enumerate(column):
        place[each] = (number + 0.5) / len(column)


def deepest_first(nodes: Iterable[str], needs: Mapping[str, Collection[str]]) -> Iterable[str]:
    """Yield each node after all that it needs, as far as there are no cycles.

    Without recursion, because a chain may be long.
    """
    seen: set[str] = set()
    for first in nodes:
        if first in seen:
            continue
        seen.add(first)
        stack = [(first, iter(needs.get(first, ())))]
        while stack:
            node, rest = stack[-1]
            if (new := next((each for each in rest if each not in seen), None)) is not None:
                seen.add(new)
                stack.append((new, iter(needs.get(new, ()))))
            else:
                stack.pop()
                yield node
