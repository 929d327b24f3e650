"""The rules of a link: when it is dialed, whose report counts, and what a loss means."""

from __future__ import annotations

import random

import pytest

from moored.kernel import (
    At,
    Backoff,
    Clock,
    Dial,
    IllegalMove,
    Loss,
    Machine,
    Pauses,
    Reconnect,
    link_chart,
)

pytestmark = pytest.mark.pure

CHART = link_chart("greeting", "login")


def made(pauses: Pauses = Pauses(proven=5.0), **options: float) -> Reconnect:  # noqa: B008
    clock = Clock(lambda: 0.0, lambda: 0.0, random.Random(1))
    backoff = Backoff(1.0, 8.0, clock=clock, **options)  # type: ignore[arg-type]
    return Reconnect(Machine("link", CHART, clock=clock), pauses, backoff)


def dialed(link: Reconnect, now: float = 0.0) -> int:
    link.want(now, "test")
    what = link.due(now)
    assert isinstance(what, Dial)
    return what.number


def up(link: Reconnect, now: float = 0.0) -> int:
    number = dialed(link, now)
    assert link.up(number, now, "test")
    return number


def test_a_link_is_dialed_once_when_it_is_wanted() -> None:
    link = made()
    assert link.due(0.0) is None
    link.want(0.0, "started")
    assert link.machine.at("connecting/dialing")
    assert link.due(0.0) == Dial(1)
    link.want(0.0, "again")
    assert link.due(99.0) is None
    assert link.up(1, 0.0, "open")
    link.want(0.0, "again")
    assert link.due(99.0) is None


def test_failed_dials_are_repeated_after_growing_pauses() -> None:
    link = made()
    now = float(dialed(link)) - 1.0
    for number, pause in enumerate((1.0, 2.0, 4.0, 8.0, 8.0), start=1):
        assert link.lost(number, "refused", now) == Loss(False, False, "refused")
        assert link.machine.at("down/waiting")
        assert link.due(now) == At(now + pause)
        now += pause
        assert link.due(now - 0.001) == At(now)
        assert link.due(now) == Dial(number + 1)
    assert link.machine.at("connecting/dialing")


def test_a_dial_has_steps_and_reports_with_another_number_are_stale() -> None:
    link = made()
    number = dialed(link)
    assert link.step(number, "greeting", "open")
    assert not link.step(number + 1, "login", "a code")
    assert link.step(number, "login", "a code")
    assert link.step(number, "login", "another code")
    assert not link.up(number - 1, 0.0, "ready")
    assert link.up(number, 0.0, "ready")
    assert not link.up(number, 1.0, "ready again")
    assert not link.step(number, "login", "too late")
    assert link.proven_at == 5.0
    assert link.lost(number + 1, "reset", 1.0) is None
    assert link.is_up


def test_a_dial_makes_no_step_back() -> None:
    link = made()
    number = dialed(link)
    link.step(number, "login", "a code")
    with pytest.raises(IllegalMove):
        link.step(number, "greeting", "again")


def test_a_loss_is_reported_once() -> None:
    link = made()
    number = up(link)
    assert link.lost(number, "reset", 1.0) == Loss(True, False, "reset")
    assert link.lost(number, "closed", 1.0) is None
    assert link.due(1.0) == At(2.0)
    assert link.why == "reset"


def test_a_dial_that_is_due_has_no_number_until_it_is_taken() -> None:
    link = made(Pauses(5.0, at_once=True))
    number = up(link)
    link.lost(number, "reset", 5.0)
    assert link.machine.at("connecting/dialing")
    assert not any(link.is_current(each) for each in range(3))
    assert link.lost(number, "closed", 5.0) is None
    assert link.due(5.0) == Dial(2)


@pytest.mark.parametrize(("at_once", "state", "due"), [(False, "down", At(11.0)), (True, "up", 0)])
def test_the_loss_of_a_proven_link_begins_the_backoff_anew(
    at_once: bool, state: str, due: object
) -> None:
    link = made(Pauses(5.0, at_once))
    number = dialed(link)
    for _ in range(3):
        link.lost(number, "refused", 0.0)
        number = dialed(link)
    link.up(number, 5.0, "open")
    link.lost(number, "reset", 10.0)
    if not at_once:
        assert link.due(10.0) == At(11.0)
        assert link.due(11.0) == Dial(5)
    else:
        assert link.due(10.0) == Dial(5)
        link.lost(5, "refused", 10.0)
        assert link.due(10.0) == At(11.0)


def test_a_link_that_is_lost_early_does_not_begin_the_backoff_anew() -> None:
    link = made(Pauses(5.0, at_once=True))
    link.lost(up(link), "reset", 4.9)
    link.lost(up(link, 9.0), "reset", 13.9)
    assert link.due(13.9) == At(15.9)


def test_a_link_may_be_proven_before_its_time() -> None:
    link = made()
    link.lost(up(link), "reset", 0.1)
    number = up(link, 2.0)
    link.proven(number - 1)
    assert link.proven_at == 7.0
    link.proven(number)
    link.lost(number, "reset", 2.1)
    assert link.due(2.1) == At(3.1)
    link.proven(number)
    assert link.lost(dialed(link, 3.0), "refused", 3.0) == Loss(False, False, "refused")
    assert link.due(3.0) == At(5.0)


def test_a_known_pause_is_used_and_not_counted() -> None:
    link = made()
    link.lost(up(link), "moved", 1.0, pause=0.0)
    assert link.due(1.0) == Dial(2)
    link.lost(2, "busy", 1.0, pause=30.0)
    assert link.due(1.0) == At(31.0)
    link.due(31.0)
    link.lost(3, "refused", 31.0)
    assert link.due(31.0) == At(32.0)


def test_an_exhausted_backoff_refuses() -> None:
    link = made(max_attempts=2)
    assert link.lost(dialed(link), "refused", 0.0) == Loss(False, False, "refused")
    link.due(1.0)
    why = "given up after attempt 2: refused"
    assert link.lost(2, "refused", 1.0) == Loss(False, True, why)
    assert link.machine.at("off/refused")
    assert link.due(99.0) is None
    assert link.why == why
    link.want(99.0, "the user connected it")
    assert link.due(99.0) == Dial(3)
    link.lost(3, "refused", 99.0)
    assert link.due(99.0) == At(100.0)


def test_an_exhausted_backoff_may_begin_another_series() -> None:
    link = made(Pauses(1.0, series=30.0), max_attempts=3)
    number, now, pauses = dialed(link), 0.0, []
    for _ in range(7):
        loss = link.lost(number, "refused", now)
        due = link.next_dial_at
        assert loss is not None
        assert due is not None
        pauses.append((due - now, loss.exhausted))
        now, number = due, number + 1
        assert link.due(now) == Dial(number)
    one = [(1.0, False), (2.0, False), (30.0, True)]
    assert pauses == [*one, *one, one[0]]


def test_a_pause_ends_early_if_the_link_is_wanted_and_the_failures_still_count() -> None:
    link = made()
    link.lost(dialed(link), "refused", 0.0)
    link.want(0.1, "the user connected it")
    assert link.due(0.1) == Dial(2)
    link.lost(2, "refused", 0.1)
    assert link.due(0.1) == At(2.1)


@pytest.mark.parametrize("where", ["down", "dialing", "up"])
@pytest.mark.parametrize("end", ["rest", "refuse"])
def test_a_link_that_is_off_is_dialed_only_when_it_is_wanted(where: str, end: str) -> None:
    link = made()
    number = up(link) if where == "up" else dialed(link)
    if where == "down":
        link.lost(number, "refused", 0.0)
    assert getattr(link, end)("no reason")
    assert not link.rest("again")
    assert not link.refuse("again")
    assert link.machine.at("off/resting" if end == "rest" else "off/refused")
    assert link.why == "no reason"
    assert link.due(99.0) is None
    assert not link.up(number, 99.0, "late")
    assert link.lost(number, "late", 99.0) is None
    link.want(99.0, "wanted again")
    assert link.due(99.0) == Dial(2)
    link.lost(2, "refused", 99.0)
    assert link.due(99.0) == At(100.0), "earlier failures do not count"


@pytest.mark.parametrize("off", [False, True])
def test_a_stopped_link_stays_stopped(off: bool) -> None:
    link = made()
    number = up(link)
    if off:
        link.rest("for now")
    assert link.stop("the end")
    assert not link.stop("again")
    assert not link.rest("again")
    link.want(0.0, "wanted again")
    assert link.machine.at("off/stopped")
    assert link.due(99.0) is None
    assert link.lost(number, "late", 99.0) is None


def test_an_observer_of_a_move_sees_the_state_after_it() -> None:
    link = made()
    seen: list[tuple[str, int, bool, float | None]] = []
    link.machine.observe(
        lambda move: seen.append((move.target.phase, link.number, link.is_up, link.next_dial_at))
    )
    number = up(link)
    link.lost(number, "reset", 1.0)
    link.due(2.0)
    link.stop("the end")
    assert seen == [
        ("connecting", 0, False, 0.0),
        ("up", 1, True, None),
        ("down", 0, False, 2.0),
        ("connecting", 2, False, None),
        ("off", 0, False, None),
    ]


def renewed(link: Reconnect, now: float) -> int:
    """Begin an attempt while the link is up, as a user of the class does."""
    link.dials += 1
    return link.dials


def test_reports_of_the_link_count_while_an_attempt_is_made_to_replace_it() -> None:
    link = made()
    number = up(link)
    attempt = renewed(link, 1.0)
    assert link.is_current(number)
    assert not link.is_current(attempt)
    # The attempt fails: there is nothing to undo.
    assert link.lost(number, "reset", 2.0) == Loss(True, False, "reset")
    assert link.due(3.0) == Dial(attempt + 1), "a number is never used twice"


def test_an_attempt_to_replace_a_lost_link_continues_as_its_dial() -> None:
    link = made()
    number = up(link)
    attempt = renewed(link, 1.0)
    link.lost(number, "reset", 2.0, pause=0.0)
    link.number, link.next_dial_at = attempt, None
    assert link.due(2.0) is None
    assert not link.is_current(number)
    assert link.up(attempt, 3.0, "open")
    assert link.dials == 2


def test_a_link_can_have_several_steps_while_it_is_up() -> None:
    chart = link_chart(up=("serving", "probing"), words={"dialing": "connecting to the server"})
    link = Reconnect(Machine("link", chart), Pauses(5.0), Backoff())
    number = up(link)
    assert link.machine.at("up/serving")
    link.machine.move("up/probing", cause="it was idle")
    link.machine.move("up/serving", cause="the server answers")
    assert link.lost(number, "reset", 1.0) == Loss(True, False, "reset")
    assert chart.words[chart.states[1]] == "connecting to the server"


def test_a_link_may_be_turned_off_in_every_state_and_only_a_stopped_one_stays_so() -> None:
    for state in CHART.states:
        names = set(map(str, CHART.legal(state)))
        if CHART.at(state, "off/stopped"):
            assert not names
        elif CHART.at(state, "off"):
            assert names == {"connecting/dialing", "off/stopped"}
        else:
            assert names >= {"connecting/dialing", "off/resting", "off/refused", "off/stopped"}
