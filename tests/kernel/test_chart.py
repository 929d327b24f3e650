"""A chart reports its mistakes when it is made, and renders as text and as a diagram."""

from __future__ import annotations

import pytest

from moored.kernel import Chart, State
from moored.kernel._state import Moves

pytestmark = pytest.mark.pure

PHASES = {"starting": ["dial", "login"], "active": (), "closing": ["flush", "bye"], "closed": ()}
LINK = Chart(
    phases=PHASES,
    moves={
        "starting/dial": "starting/login",
        "starting/login": "active",
        "active": ["closing", "starting"],
        "closing/flush": "closing/bye",
        "closing": "closed",
        "starting": ("starting",),
    },
    initial="starting",
)


def names(states: tuple[State, ...]) -> list[str]:
    return [str(state) for state in states]


def test_a_state_is_found_by_each_of_its_notations() -> None:
    dial = State("starting", "dial")
    assert LINK.find("starting/dial") == LINK.find(("starting", "dial")) == LINK.find(dial) == dial
    assert LINK.find("starting") == dial
    assert LINK.find("active") == State("active", "active")
    assert str(State("active", "active")) == "active"
    assert LINK.find("starting/nothing") is None
    assert LINK.find("*") is None


def test_legal_moves() -> None:
    assert names(LINK.legal(State("starting", "dial"))) == ["starting/login", "starting/dial"]
    assert names(LINK.legal(State("active", "active"))) == ["closing/flush", "starting/dial"]
    assert names(LINK.legal(State("closing", "flush"))) == ["closing/bye", "closed"]
    assert LINK.legal(State("closed", "closed")) == ()


@pytest.mark.parametrize(
    "moves",
    [
        [("a", "b"), ("*", "a")],
        {"a": "b", "*": "a"},
        {"a": ["b"], "*": [State("a", "a")]},
        [(State("a", "a"), ("b", "b")), ("*", "a")],
    ],
)
def test_moves_may_be_pairs_or_a_mapping(moves: Moves) -> None:
    chart = Chart(phases={"a": (), "b": ()}, moves=moves, initial="a")
    assert names(chart.legal(State("a", "a"))) == ["b", "a"]
    assert names(chart.legal(State("b", "b"))) == ["a"]


def test_all_undeclared_states_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="Chart: ") as caught:
        Chart(
            phases={"a": ["x"], "b": ()},
            moves=[("a", "gone"), ("lost/x", "a"), ("a", "b"), ("a", "*")],
            initial="nowhere",
        )
    assert str(caught.value).removeprefix("Chart: ").split("; ") == [
        "'nowhere' is not a declared state",
        "'lost/x' is not a declared state",
        "'gone' is not a declared state",
        "'*' is not a declared state",
    ]


def test_a_state_that_is_never_reached_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"^Chart: 'b' can never be reached from 'a'; 'c/y' can"):
        Chart(
            phases={"a": (), "b": (), "c": ["x", "y"]}, moves=[("a", "c"), ("b", "a")], initial="a"
        )


def test_text_is_a_table_of_the_declared_moves() -> None:
    assert LINK.text().splitlines() == [
        "from                  to",
        "starting/dial         starting/login",
        "starting/login        active",
        "active                closing/flush, starting/dial",
        "closing/flush         closing/bye",
        "closed                nowhere: it ends here",
        "any step of starting  starting/dial",
        "any step of closing   closed",
    ]


def test_text_of_moves_from_anywhere() -> None:
    chart = Chart(phases={"a": (), "b": ()}, moves=[("a", "b"), ("*", "a")], initial="a")
    assert chart.text().splitlines() == ["from       to", "a          b", "any state  a"]


def test_mermaid() -> None:
    assert LINK.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> starting__dial",
        '    state "starting" as phase_starting {',
        '        state "dial" as starting__dial',
        '        state "login" as starting__login',
        "    }",
        '    state "active" as active__active',
        '    state "closing" as phase_closing {',
        '        state "flush" as closing__flush',
        '        state "bye" as closing__bye',
        "    }",
        '    state "closed" as closed__closed',
        "    starting__dial --> starting__login",
        "    starting__login --> active__active",
        "    active__active --> closing__flush",
        "    active__active --> starting__dial",
        "    closing__flush --> closing__bye",
        "    phase_closing --> closed__closed",
        # An arrow from a box to a step inside it cannot be drawn, so each step has its own.
        "    starting__dial --> starting__dial",
        "    starting__login --> starting__dial",
        "    closed__closed --> [*]",
    ]


def test_mermaid_of_moves_from_anywhere_and_odd_names() -> None:
    chart = Chart(
        phases={"end": ["half open", "x-y"], "b": ()},
        moves=[("end/half open", "end/x-y"), ("*", "b")],
        initial="end",
    )
    lines = [line.strip() for line in chart.mermaid().splitlines()]
    assert 'state "half open" as end__half_open' in lines
    assert lines[-3:] == [
        "end__half_open --> end__x_y",
        "phase_end --> b__b",
        "b__b --> b__b",
    ]


def test_the_repr_counts_phases_states_and_moves() -> None:
    assert repr(LINK) == "<Chart: 4 phases, 6 states, 7 moves, from starting/dial>"
