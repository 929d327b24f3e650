"""What needs what: the parts of a service, and the servers behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._layout import Role, deepest_first
from ._part import Part

__all__ = ["KINDS", "Graph", "Kind", "Node", "graph_of"]


class Kind(NamedTuple):
    """What the map says about the parts of one kind."""

    #: One of them, and several.
    word: str
    words: str
    #: What it does, as a sentence.
    says: str


#: What a part may be.
KINDS: Mapping[str, Kind] = {
    "pool": Kind(
        "connection pool", "connection pools", "Lends connections to the code of this service."
    ),
    "stream": Kind(
        "change stream",
        "change streams",
        "Reads every committed change, in order, and passes it on to those that consume it.",
    ),
    "consumer": Kind(
        "consumer", "consumers", "Handles each change or event once, and then acknowledges it."
    ),
    "broker": Kind("live events", "brokers", "Sends events to the streams of browsers."),
    "channel": Kind(
        "gRPC channel", "gRPC channels", "Keeps a connection for the gRPC calls of this service."
    ),
    "sessions": Kind("accounts", "groups of accounts", "Keeps each account online."),
    "leases": Kind("leases", "lease clients", "Holds leases that several processes share."),
    "component": Kind("component", "components", "Runs code of this service."),
    "server": Kind("server", "servers", "A server that this service needs."),
    "browsers": Kind("browsers", "browsers", "Those who listen to live events."),
}
BROWSERS = "browsers"


@dataclass(frozen=True)
class Node:
    """A part, a server, or those who listen."""

    id: str
    kind: str
    role: Role
    #: What it is, in words.
    what: str
    #: The address of the server that it is or runs; None for other parts.
    runs: str | None = None


@dataclass(frozen=True)
class Graph:
    """All nodes in the order of declaration, and what each needs; without cycles."""

    nodes: Mapping[str, Node]
    #: What each node needs, without what these need anyway.
    needs: Mapping[str, Sequence[str]]
    #: The reverse of `needs`.
    serves: Mapping[str, Sequence[str]]

    def behind(self, node: str) -> list[str]:
        """Return all that a node needs, directly or not, the nearest first."""
        found = dict.fromkeys(self.needs[node])
        for each in (order := list(found)):
            new = [one for one in self.needs[each] if one not in found]
            found.update(dict.fromkeys(new))
            order.extend(new)
        return order


def graph_of(parts: Iterable[Part]) -> Graph:
    """Return the graph of these parts; a server that a part runs is that part."""
    parts = [each for each in parts if each.shown]
    runs = {address: part.name for part in parts for address in part.runs}
    nodes = {part.name: _node(part) for part in parts}
    wanted: dict[str, list[str]] = {}
    for part in parts:
        # Sorted, because a set of ties has no order.
        wanted[part.name] = needed = []
        for tie in sorted(part.ties):
            if (name := runs.get(tie, tie)) not in nodes:
                nodes[name] = Node(name, "server", "server", part.server, name)
            if name != part.name and name not in needed:
                needed.append(name)
    if any(part.kind == "broker" for part in parts):
        name = next(each for each in _names(BROWSERS) if each not in nodes)
        nodes[name] = Node(name, "browsers", "outside", "browsers")
        wanted[name] = [part.name for part in parts if part.kind == "broker"]
    needs = _reduced(nodes, wanted)
    serves: dict[str, list[str]] = {name: [] for name in nodes}
    for name, needed_by_it in needs.items():
        for each in needed_by_it:
            serves[each].append(name)
    return Graph(nodes, needs, serves)


def _node(part: Part) -> Node:
    if part.runs:
        address = next(iter(part.runs))
        return Node(part.name, "server", "server", part.server, address)
    kind = part.kind if part.kind in KINDS else "component"
    return Node(part.name, kind, "part", KINDS[kind].word if kind == part.kind else part.kind)


def _names(name: str) -> Iterable[str]:
    yield name
    number = 2
    while True:
        yield f"{name} {number}"
        number += 1


def _reduced(
    nodes: Collection[str], wanted: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Leave out each need that another one implies, and the last edge of each cycle.

    What a node reaches is a set of bits, because unions of integers are fast.
    """
    place = {name: number for number, name in enumerate(nodes)}
    reach: dict[str, int] = {}
    needs: dict[str, Sequence[str]] = {}
    for name in deepest_first(nodes, wanted):
        known = [each for each in wanted.get(name, ()) if each in reach]
        behind = [reach[each] for each in known]
        implied = 0
        for bits in behind:
            implied |= bits
        kept = [each for each in known if not implied >> place[each] & 1]
        needs[name] = sorted(kept, key=place.__getitem__)
        reach[name] = implied
        for each in known:
            reach[name] |= 1 << place[each]
    return {name: needs[name] for name in nodes}
