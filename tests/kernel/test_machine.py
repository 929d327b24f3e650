"""A machine makes only declared moves, and keeps each with its cause."""

from __future__ import annotations

import json
import logging

import pytest
from tests.kernel.fake_clock import NOON, FakeClock

from moored.kernel import Chart, IllegalMove, Machine, Move, Recorder, State

pytestmark = pytest.mark.pure

LINK = Chart(
    phases={"starting": ["dial", "login"], "active": (), "closed": ()},
    moves=[
        ("starting/dial", "starting/login"),
        ("starting/login", "active"),
        ("active", "starting"),
        ("starting", "starting"),
        ("*", "closed"),
    ],
    initial="starting",
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def machine(clock: FakeClock) -> Machine:
    return Machine("link", LINK, clock=clock)


def test_a_machine_begins_in_the_initial_state(machine: Machine) -> None:
    assert machine.state == State("starting", "dial") == ("starting", "dial")
    assert (machine.phase, machine.step, machine.since) == ("starting", "dial", 0.0)
    assert machine.history == ()


def test_a_state_is_compared_by_phase_by_step_or_by_both(machine: Machine) -> None:
    assert all(machine.at(name) for name in ("starting", "dial", "starting/dial"))
    assert not machine.at("login", "starting/login", "active", "closed")
    assert machine.at("active", "dial")
    move = machine.move("starting/login", cause="test")
    assert machine.chart.at(move.source, "dial")
    assert not machine.chart.at(move.target, "dial", "active")


@pytest.mark.parametrize("name", ["online", "starting/gone", "active/dial", ""])
def test_a_comparison_with_an_undeclared_name_is_an_error(machine: Machine, name: str) -> None:
    with pytest.raises(ValueError, match="is not a declared phase, step or state"):
        machine.at("dial", name)


def test_a_move_has_a_cause_and_a_time(machine: Machine, clock: FakeClock) -> None:
    clock.advance(2.5)
    move = machine.move("starting/login", cause="the server answered")
    assert move == Move(
        at=2.5,
        wall=NOON + 2.5,
        source=State("starting", "dial"),
        target=State("starting", "login"),
        cause="the server answered",
        lasted=2.5,
        event=None,
    )
    assert machine.history == (move,)
    assert machine.since == 2.5
    assert str(move) == "starting/dial -> starting/login after 2.5 s, because the server answered"


def test_an_illegal_move_names_both_states_and_the_legal_ones(machine: Machine) -> None:
    with pytest.raises(IllegalMove) as caught:
        machine.move("active", cause=TimeoutError("no answer"))
    assert str(caught.value) == (
        "link: may not move from starting/dial to active "
        "(because no answer (TimeoutError)); "
        "from starting/dial it may move to starting/login, starting/dial, closed"
    )
    assert machine.state == ("starting", "dial")
    assert machine.history == ()


def test_a_move_to_an_unknown_state_names_the_legal_ones(machine: Machine) -> None:
    with pytest.raises(IllegalMove, match=r"to starting/gone .*, which is not a declared state; "):
        machine.move("starting/gone", cause="test")


def test_no_move_leaves_a_final_state(clock: FakeClock) -> None:
    chart = Chart(phases={"a": (), "b": ()}, moves=[("a", "b")], initial="a")
    machine = Machine("x", chart, clock=clock)
    machine.move("b", cause="done")
    with pytest.raises(IllegalMove, match="from b it may move to nothing"):
        machine.move("a", cause="again")


def test_restart_moves_from_a_whole_phase_and_from_anywhere(machine: Machine) -> None:
    machine.move("starting", cause="first dial failed")
    machine.move("starting/login", cause="answered")
    machine.move("starting", cause="login failed")
    machine.move("closed", cause="stop")
    machine.move("closed", cause="stop again")
    assert [str(move.target) for move in machine.history] == [
        "starting/dial",
        "starting/login",
        "starting/dial",
        "closed",
        "closed",
    ]


def test_history_is_bounded(clock: FakeClock) -> None:
    machine = Machine("link", LINK, clock=clock, history=2)
    for number in range(5):
        machine.move("starting", cause=str(number))
    assert [move.cause for move in machine.history] == ["3", "4"]


def test_observers_see_each_move_in_order_even_if_one_moves_again(machine: Machine) -> None:
    first: list[str] = []
    second: list[str] = []

    def eager(move: Move) -> None:
        first.append(str(move.target))
        if move.target == ("starting", "login"):
            machine.move("active", cause="at once")

    machine.observe(eager)
    stop = machine.observe(lambda move: second.append(str(move.target)))
    machine.move("starting/login", cause="answered")
    assert first == second == ["starting/login", "active"]
    stop()
    machine.move("starting", cause="lost")
    assert first[-1] == "starting/dial"
    assert second[-1] == "active"


def test_an_observer_that_raises_is_logged_once_and_the_others_run(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Move] = []

    def broken(move: Move) -> None:
        raise ValueError("cannot draw")

    machine.observe(broken)
    machine.observe(seen.append)
    with caplog.at_level(logging.ERROR, "moored.kernel"):
        machine.move("starting", cause="one")
        machine.move("starting", cause="two")
    assert [move.cause for move in seen] == ["one", "two"]
    assert len(caplog.records) == 1
    assert "broken" in caplog.text
    assert "of machine 'link' raised" in caplog.text


def test_states_are_recorded_with_their_causes(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    machine = Machine("link", LINK, clock=clock, recorder=recorder)
    answered = recorder.record("server", "answered")
    move = machine.move("starting/login", cause=answered)
    assert move.cause == "answered"
    machine.move("active", cause="the password was right")
    last = machine.move("closed", cause=ConnectionResetError("peer reset"))
    events = recorder.events("link")
    assert [(event.kind, event.text) for event in events] == [
        ("state", "at starting / dial"),
        ("state", "at starting / login"),
        ("state", "at active"),
        ("state", "at closed"),
    ]
    assert recorder.cause(events[1]) is answered
    assert move.event is events[1]
    assert last.event is events[3]
    clock.advance(14)
    assert recorder.explain("link") == (
        "at closed for 14 s\n  because  peer reset (ConnectionResetError)"
    )


def test_as_dict_and_repr(machine: Machine, clock: FakeClock) -> None:
    clock.advance(1)
    machine.move("starting/login", cause="answered")
    clock.advance(3)
    assert repr(machine) == "<Machine link: at starting/login for 3.0 s>"
    assert json.loads(json.dumps(machine.as_dict())) == {
        "name": "link",
        "phase": "starting",
        "step": "login",
        "doing": "starting / login",
        "for": 3.0,
        "history": [
            {
                "wall": NOON + 1,
                "from": "starting/dial",
                "to": "starting/login",
                "cause": "answered",
                "lasted": 1.0,
            }
        ],
    }


def test_the_default_clock_is_the_current_one() -> None:
    machine = Machine("link", LINK)
    assert machine.as_dict()["for"] >= 0.0


def test_a_chart_may_have_words_for_its_steps(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    chart = Chart(
        phases={"up": (), "down": ("dial", "login")},
        moves=[("down", "up"), ("down/dial", "down/login")],
        initial="down",
        words={"dial": "dialing the server"},
    )
    machine = Machine("link", chart, clock=clock, recorder=recorder)
    machine.move("down/login", cause="answered")
    assert [event.text for event in recorder.events()] == ["dialing the server", "at down / login"]
    assert machine.as_dict()["doing"] == "down / login"
