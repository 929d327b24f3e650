"""The map: what needs what, where it is drawn, and stacks of alike parts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.service import Part
from moored.service._graph import graph_of
from moored.service._layout import MAX_LAYERS, MAX_ROWS
from moored.service._map import STACKED, Map, Maps
from moored.testing import scaled

pytestmark = pytest.mark.pure


def part(name: str, kind: str = "component", *ties: str, **more: Any) -> Part:
    return Part(name, lambda wiring: (), kind=kind, ties=ties, **more)


def map_of(parts: list[Part], bad: tuple[str, ...] = ()) -> Map:
    return Maps(graph_of(parts)).map(bad)


SHOP = [
    part("server", runs=["pg:5432", "pg:6432"], server="PostgreSQL"),
    part("db", "pool", "server", "pg:5432"),
    part("postgres", "stream", "server", "pg:6432"),
    part("live", "broker", "postgres"),
    part("grpc", "channel", "grpc:50051", server="gRPC server"),
    part("search", "consumer", "postgres", "server"),
    part("web", "component", "db", "grpc"),
    part("buttons", shown=False),
]


def by_layer(drawn: Map) -> list[list[str]]:
    layers: list[list[str]] = [[] for _ in range(drawn.layout.layers)]
    for unit in sorted(drawn.units, key=lambda each: drawn.layout.place[each]):
        layers[drawn.layout.layer[unit]].append(unit)
    return layers


def test_servers_are_on_the_right_and_listeners_on_the_left() -> None:
    assert by_layer(map_of(SHOP)) == [
        ["browsers"],
        ["search", "live", "web"],
        ["postgres", "db", "grpc"],
        ["server", "grpc:50051"],
    ]


def test_lanes_are_grouped_by_server_and_what_is_needed_is_above() -> None:
    assert map_of(SHOP).lanes() == [
        ["server", "postgres", "search", "live", "db", "web"],
        ["grpc:50051", "grpc"],
    ]
    assert map_of([part("a"), part("b", "component", "a"), part("c")]).lanes() == [
        ["a", "b"],
        ["c"],
    ]


def test_lanes_have_each_part_of_a_stack_once() -> None:
    parts = [part(f"pool {number}", "pool", "db:5432") for number in range(7)]
    (lane,) = map_of(parts).lanes()
    assert lane == ["db:5432", *(each.name for each in parts)]


def test_a_server_is_the_part_that_runs_it_and_a_need_that_another_implies_is_left_out() -> None:
    graph = graph_of(SHOP)
    assert graph.needs["db"] == ["server"]
    assert graph.needs["search"] == ["postgres"]
    assert graph.serves["server"] == ["db", "postgres"]
    assert graph.behind("search") == ["postgres", "server"]
    assert graph.nodes["grpc:50051"].role == "server"


def test_edges_have_the_direction_of_the_data_and_its_flow() -> None:
    series = ["db.checkouts", "postgres.changes", "live.delivered", "search.handled"]
    found = map_of(SHOP).as_dict(series, {"db": "db.in_use"})
    assert {(each["from"], each["to"]): each["flow"] for each in found["edges"]} == {
        ("db", "server"): "db.checkouts",
        ("server", "postgres"): "postgres.changes",
        ("postgres", "live"): None,  # not recorded
        ("grpc", "grpc:50051"): None,
        ("postgres", "search"): "search.handled",
        ("web", "db"): "db.checkouts",
        ("web", "grpc"): None,
        ("live", "browsers"): "live.delivered",
    }
    assert {each["id"]: each["main"] for each in found["nodes"] if each["main"]} == {
        "db": "db.in_use"
    }


def test_the_flow_of_one_of_several_users_is_unknown() -> None:
    parts = [part("db", "pool", "pg:5432"), part("a", "component", "db"), part("b", "", "db")]
    edges = map_of(parts).as_dict(["db.checkouts"], {})["edges"]
    assert {each["from"]: each["flow"] for each in edges} == {
        "db": "db.checkouts",
        "a": None,
        "b": None,
    }


def test_alike_parts_are_a_stack_which_those_that_do_not_work_leave() -> None:
    parts = [part("pg", "stream", "pg:5432"), *(part(f"c{n}", "consumer", "pg") for n in range(37))]
    names = [unit.name for unit in map_of(parts).units.values()]
    assert names == ["pg", "37 consumers", "pg:5432"]
    drawn = map_of(parts, ("c3", "c8", "pg"))
    assert sorted(unit.name for unit in drawn.units.values()) == [
        *("35 consumers", "c3", "c8", "pg", "pg:5432")
    ]
    assert drawn.needs["c3"] == drawn.needs["+c0"] == ["pg"]
    many = map_of(parts, tuple(f"c{n}" for n in range(11)))
    assert sorted(unit.name for unit in many.units.values()) == [
        *("+ 7 more", "26 consumers", "c0", "c1", "c2", "c3", "pg", "pg:5432")
    ]
    most = map_of(parts, tuple(f"c{n}" for n in range(20)))
    assert [unit.name for unit in most.units.values()] == names


def test_servers_of_stacked_parts_are_a_stack() -> None:
    parts = [
        part(f"ch{n}", "channel", f"host{n}:50051", server="gRPC server") for n in range(STACKED)
    ]
    drawn = map_of([*parts, part("web", "component", *(each.name for each in parts))])
    assert [unit.name for unit in drawn.units.values()] == [
        *("6 gRPC channels", "web", "6 gRPC servers")
    ]


def test_five_alike_parts_are_no_stack() -> None:
    parts = [part(f"c{n}", "consumer") for n in range(STACKED - 1)]
    assert not any(unit.is_stack for unit in map_of(parts).units.values())


def test_an_edge_over_several_layers_has_a_slot_in_each() -> None:
    chain = [part("a", "", "pg:1"), part("b", "", "a"), part("c", "", "b"), part("d", "", "c")]
    drawn = map_of([*chain, part("e", "", "d", "x:1")])
    edge = next(each for each in drawn.as_dict((), {})["edges"] if each["to"] == "x:1")
    assert [layer for layer, _ in edge["via"]] == [1, 2, 3, 4]
    rows = {(drawn.layout.layer[each], drawn.layout.place[each]) for each in drawn.units}
    assert not rows.intersection(map(tuple, edge["via"]))


def test_parts_that_need_each_other_are_drawn() -> None:
    drawn = map_of([part("a", "", "b"), part("b", "", "c"), part("c", "", "a", "a")])
    assert set(drawn.layout.layer) == {"a", "b", "c"}


def test_a_service_without_parts_has_an_empty_map() -> None:
    empty = {"layers": 0, "rows": 0, "nodes": [], "edges": [], "lanes": []}
    assert map_of([]).as_dict((), {}) == empty


def test_two_thousand_nodes_are_at_most_48_on_the_map() -> None:
    chosen = random.Random(7)
    parts = [
        part(
            f"p{n}",
            chosen.choice(["pool", "component", "consumer", "channel", "own kind"]),
            *(f"p{chosen.randrange(n)}" for _ in range(chosen.randrange(3)) if n),
            f"host:{chosen.randrange(900)}",
        )
        for n in range(1200)
    ]
    drawn = map_of(parts, ("p3", "p700"))
    assert len(drawn.graph.nodes) > 1700
    _check(drawn)


KINDS = st.sampled_from(["pool", "stream", "broker", "consumer", "channel", "component"])


@st.composite
def services(draw: st.DrawFn) -> list[Part]:
    found = []
    for number in range(draw(st.integers(0, 40))):
        known = [*(f"p{each}" for each in range(number)), *(f"h:{n}" for n in range(12))]
        ties = draw(st.lists(st.sampled_from(known), max_size=4))
        runs = draw(st.sampled_from([(), (), (), ("h:1",)]))
        found.append(part(f"p{number}", draw(KINDS), *ties, runs=runs))
    return found


def _check(drawn: Map) -> None:
    layers, rows, layer, place, via = drawn.layout
    assert layers <= MAX_LAYERS
    assert rows <= MAX_ROWS
    assert len({(layer[each], place[each]) for each in drawn.units}) == len(drawn.units)
    assert all(0 <= row <= rows - 1 for row in place.values())
    taken = {(layer[each], place[each]) for each in drawn.units}
    assert all(slot not in taken for way in via.values() for slot in way)
    roles = {each: unit.members[0].role for each, unit in drawn.units.items()}
    for role, number in (("server", layers - 1), ("outside", 0)):
        inside = {layer[each] for each in drawn.units if roles[each] == role}
        assert inside <= {number}
        if inside:
            assert all(layer[each] != number for each in drawn.units if roles[each] != role)
    assert set(drawn.unit_of) == set(drawn.graph.nodes)
    members = Counter(node.id for unit in drawn.units.values() for node in unit.members)
    assert set(members.values()) <= {1}
    assert all(unit.is_stack or each == unit.members[0].id for each, unit in drawn.units.items())


@settings(max_examples=scaled(2000, least=60), deadline=None)
@given(services(), st.randoms(use_true_random=False))
def test_every_map_fits_and_no_two_nodes_are_at_one_place(
    parts: list[Part], chosen: random.Random
) -> None:
    graph = graph_of(parts)
    bad = [each for each in graph.nodes if chosen.random() < 0.2]
    _check(Maps(graph).map(bad))
    _check(Maps(graph).map())


@settings(max_examples=scaled(1000, least=40), deadline=None)
@given(services(), st.randoms(use_true_random=False))
def test_the_map_depends_on_what_is_drawn_alone(parts: list[Part], chosen: random.Random) -> None:
    """The order of ties and the states of nodes outside of stacks change nothing."""
    whole = Maps(graph_of(parts))
    first = whole.map().as_dict((), {})
    shuffled = [
        part(
            each.name,
            each.kind,
            *chosen.sample(list(each.ties), len(each.ties)),
            runs=each.runs,
        )
        for each in parts
    ]
    others = [each for each in whole.graph.nodes if each not in whole.stacked]
    again = Maps(graph_of(shuffled)).map(others)
    assert again.as_dict((), {}) == first


def test_the_ways_of_a_graph_end() -> None:
    graph = graph_of([part(f"p{n}", "", f"p{n - 1}") for n in range(3000)])
    assert len(graph.behind("p2999")) == 3000
