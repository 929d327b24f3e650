"""The rules for connecting: when, how often, and when not at all."""

from __future__ import annotations

import random

import pytest

from moored.kernel import Backoff, Clock, Machine, Recorder
from moored.sessions import CloseClass
from moored.sessions.link._core import CHART, PROVEN, RESTARTS, DialNow, Idle, SessionCore, Wait

pytestmark = pytest.mark.pure

FINAL = [
    CloseClass.TAKEOVER,
    CloseClass.AUTHENTICATION,
    CloseClass.BANNED,
    CloseClass.OUTDATED,
]


@pytest.fixture
def core() -> SessionCore:
    clock = Clock(monotonic=lambda: 0.0, wall=lambda: 0.0, random=random.Random(1))
    machine = Machine("session", CHART, clock=clock, recorder=Recorder(clock=clock))
    return SessionCore(machine, Backoff(1.0, 60.0, clock=clock))


def online(core: SessionCore, now: float = 0.0) -> int:
    """Take it all the way."""
    core.connect()
    what = core.next(now)
    assert isinstance(what, DialNow)
    assert core.dialled(what.generation)
    assert core.ready(what.generation, now)
    return what.generation


def test_it_dials_once_and_then_waits_for_what_happens(core: SessionCore) -> None:
    assert core.next(0.0) == Idle()
    core.connect()
    assert core.next(0.0) == DialNow(1)
    assert core.next(0.0) == Idle()
    assert core.dialled(1)
    assert core.next(0.0) == Idle()
    assert core.ready(1, 0.0)
    assert core.online
    assert core.next(99.0) == Idle()


def test_a_transient_loss_is_followed_by_growing_pauses_without_end(core: SessionCore) -> None:
    online(core)
    now, pauses = 0.0, []
    for generation in range(1, 12):
        assert core.lost(generation, CloseClass.TRANSIENT, "reset", now)
        assert not core.online
        waiting = core.next(now)
        assert isinstance(waiting, Wait)
        pauses.append(waiting.until - now)
        assert core.next(waiting.until - 0.001) == waiting
        now = waiting.until
        assert core.next(now) == DialNow(generation + 1)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


def test_only_a_link_that_has_lasted_ends_the_growth(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TRANSIENT, "reset", 0.1)
    assert core.next(0.1) == Wait(1.1)
    core.next(1.1)
    core.dialled(2)
    core.ready(2, 2.0)
    core.lost(2, CloseClass.TRANSIENT, "reset", 2.0 + PROVEN - 0.1)
    assert core.next(6.9) == Wait(6.9 + 2.0)
    core.next(9.0)
    core.dialled(3)
    core.ready(3, 10.0)
    core.lost(3, CloseClass.TRANSIENT, "reset", 10.0 + PROVEN)
    assert core.next(15.0) == Wait(16.0)


def test_a_link_that_has_done_its_part_need_not_last(core: SessionCore) -> None:
    pauses = []
    for _ in range(3):
        generation = online(core, 0.0)
        core.proven()
        core.lost(generation, CloseClass.TRANSIENT, "more is to come", 0.1)
        pauses.append(core.next_attempt_in(0.1))
        core.connect()
    assert len(set(pauses)) == 1


def test_a_restart_is_made_at_once_and_not_counted(core: SessionCore) -> None:
    online(core)
    assert core.lost(1, CloseClass.RESTART, "515", 0.0)
    assert core.restarting
    assert core.next(0.0) == DialNow(2)
    assert core.backoff.attempts == 0
    assert core.dialled(2)
    assert core.restarting
    assert core.ready(2, 0.0)
    assert not core.restarting


def test_a_server_that_wants_restarts_for_ever_must_wait(core: SessionCore) -> None:
    online(core)
    for generation in range(1, RESTARTS + 1):
        core.lost(generation, CloseClass.RESTART, "515", 0.0)
        assert core.next(0.0) == DialNow(generation + 1)
        core.dialled(generation + 1)
    core.lost(RESTARTS + 1, CloseClass.RESTART, "515", 0.0)
    assert core.next(0.0) == Wait(1.0)
    assert not core.restarting


def test_the_server_may_ask_for_a_longer_pause(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TRANSIENT, "busy", 0.0, retry_after=30.0)
    assert core.next(0.0) == Wait(30.0)


@pytest.mark.parametrize("kind", FINAL)
def test_after_what_is_final_nothing_is_dialled_until_the_user_says_so(
    core: SessionCore, kind: CloseClass
) -> None:
    online(core)
    assert core.lost(1, kind, "conflict", 0.0)
    assert str(core.machine.state) == "offline/refused"
    assert core.next(1e9) == Idle()
    assert core.last_kind is kind
    core.connect("the user has logged in again")
    assert core.next(1e9) == DialNow(2)


def test_what_an_old_link_says_changes_nothing(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.RESTART, "515", 0.0)
    core.next(0.0)
    assert not core.lost(1, CloseClass.TAKEOVER, "conflict", 0.0)
    assert not core.ready(1, 0.0)
    assert not core.dialled(1)
    assert not core.login(1, "code")
    assert core.dialled(2)
    assert not core.lost(1, CloseClass.BANNED, "banned", 0.0)
    assert core.ready(2, 0.0)


def test_what_a_link_says_twice_changes_nothing(core: SessionCore) -> None:
    core.connect()
    assert core.next(0.0) == DialNow(1)
    assert core.dialled(1)
    assert not core.dialled(1)
    assert core.ready(1, 0.0)
    assert not core.ready(1, 1.0)
    assert not core.login(1, "code")
    assert not core.dialled(1)
    assert core.reconnects == 0
    assert core.lost(1, CloseClass.TRANSIENT, "closed", 2.0)
    assert not core.lost(1, CloseClass.BANNED, "banned", 2.0)
    assert str(core.machine.state) == "connecting/waiting"


def test_a_second_end_of_a_link_that_was_refused_changes_nothing(core: SessionCore) -> None:
    generation = online(core)
    assert core.lost(generation, CloseClass.TAKEOVER, "conflict", 0.0)
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert str(core.machine.state) == "offline/refused"
    assert core.why == (CloseClass.TAKEOVER, "conflict")


def test_a_dial_of_before_a_disconnect_is_not_that_of_the_next_connect(core: SessionCore) -> None:
    core.connect()
    assert core.next(0.0) == DialNow(1)
    core.disconnect()
    core.connect()
    assert not core.dialled(1)
    assert isinstance(core.next(0.0), DialNow)


def test_a_disconnected_one_rests_and_whatever_its_link_says_is_old(core: SessionCore) -> None:
    generation = online(core)
    core.disconnect()
    assert str(core.machine.state) == "offline/resting"
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert core.next(1e9) == Idle()


def test_a_dial_that_ends_after_the_user_disconnected_is_not_wanted(core: SessionCore) -> None:
    core.connect()
    assert core.next(0.0) == DialNow(1)
    core.disconnect()
    assert not core.dialled(1)


def test_a_login_may_take_several_steps(core: SessionCore) -> None:
    core.connect()
    core.next(0.0)
    core.dialled(1)
    assert core.login(1, "pairing code")
    assert core.login(1, "another pairing code")
    assert core.ready(1, 0.0)
    assert not core.login(1, "too late")


def test_a_crashed_one_connects_by_itself(core: SessionCore) -> None:
    online(core)
    core.crashed("defect", 0.0)
    assert core.next(0.0) == Wait(1.0)
    assert core.next(1.0) == DialNow(3)  # the crash has made everything of link 1 old


def test_a_crash_does_not_bring_back_what_was_refused(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TAKEOVER, "conflict", 0.0)
    core.crashed("defect", 0.0)
    assert core.next(1e9) == Idle()


def test_a_stopped_one_stays_stopped(core: SessionCore) -> None:
    online(core)
    core.stop("the user stopped it")
    core.stop("again")
    core.connect()
    assert core.stopped
    assert core.next(1e9) == Idle()
    assert not core.lost(1, CloseClass.TRANSIENT, "closed", 0.0)


def lost_once(core: SessionCore) -> None:
    """Let its first attempt fail, so that it waits until 1.0."""
    core.connect()
    assert core.next(0.0) == DialNow(1)
    assert core.lost(1, CloseClass.TRANSIENT, "refused", 0.0)
    assert core.next(0.0) == Wait(1.0)


def test_who_asks_for_a_link_in_a_pause_ends_the_pause(core: SessionCore) -> None:
    lost_once(core)
    core.connect("the user connected it")
    assert core.next(0.1) == DialNow(2)
    core.connect("the user connected it")
    assert core.next(0.1) == Idle(), "it is made already"
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 0.2)
    assert core.next(0.2) == Wait(0.2 + 2.0), "asking does not make the server better"


def test_what_is_said_of_a_link_that_nobody_has_begun_changes_nothing(core: SessionCore) -> None:
    lost_once(core)
    core.connect("the user connected it")
    assert not core.lost(1, CloseClass.BANNED, "banned", 0.1)
    assert core.next(0.1) == DialNow(2)


def test_only_being_online_again_is_a_reconnect(core: SessionCore) -> None:
    lost_once(core)
    core.next(1.0)
    core.dialled(2)
    assert core.reconnects == 0
    core.ready(2, 1.0)
    assert core.reconnects == 0
    core.lost(2, CloseClass.RESTART, "515", 2.0)
    assert core.next(2.0) == DialNow(3)
    core.dialled(3)
    assert core.reconnects == 0
    core.ready(3, 2.0)
    assert core.reconnects == 1


def test_while_it_is_online_there_is_no_reason_not_to_be(core: SessionCore) -> None:
    lost_once(core)
    whys = [core.why]
    core.next(1.0)
    whys.append(core.why)
    core.dialled(2)
    core.ready(2, 1.0)
    whys.append(core.why)
    core.lost(2, CloseClass.TAKEOVER, "conflict", 2.0)
    whys.append(core.why)
    refused = (CloseClass.TRANSIENT, "refused")
    assert whys == [refused, refused, (None, ""), (CloseClass.TAKEOVER, "conflict")]


def test_the_next_attempt_has_a_time_only_in_a_pause(core: SessionCore) -> None:
    assert core.next_attempt_in(0.0) is None
    lost_once(core)
    assert core.next_attempt_in(0.25) == 0.75
    assert core.next_attempt_in(9.0) == 0.0, "it is late"
    core.next(9.0)
    assert core.next_attempt_in(9.0) is None
    core.dialled(2)
    core.ready(2, 9.0)
    assert core.next_attempt_in(9.0) is None


def test_who_does_not_want_to_try_for_ever_gives_up_in_order(core: SessionCore) -> None:
    core.backoff.max_attempts = 2
    online(core)
    assert core.lost(1, CloseClass.TRANSIENT, "reset", 0.0)
    assert core.next(1.0) == DialNow(2)
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 1.0)
    assert str(core.machine.state) == "offline/refused"
    assert core.why == (CloseClass.TRANSIENT, "given up after attempt 2: refused")
    assert core.next(99.0) == Idle()
    # Somebody who asks for it begins from the start.
    core.connect()
    assert core.next(99.0) == DialNow(3)
    assert core.lost(3, CloseClass.TRANSIENT, "refused", 99.0)
    assert core.next(99.0) == Wait(100.0)
    core.crashed("a defect", 99.0)
    assert core.next(100.0) == DialNow(5)
    core.crashed("a defect", 100.0)
    assert str(core.machine.state) == "offline/refused"


def test_a_crash_after_a_link_that_has_lasted_has_a_short_pause(core: SessionCore) -> None:
    online(core)
    for generation in range(1, 6):
        core.lost(generation, CloseClass.TRANSIENT, "reset", 0.0)
        core.connect()
        core.next(0.0)
    core.dialled(6)
    core.ready(6, 0.0)
    core.crashed("a defect", PROVEN)
    assert core.next(PROVEN) == Wait(PROVEN + 1.0)


def test_a_new_beginning_by_the_user_has_short_pauses(core: SessionCore) -> None:
    generation = online(core)
    for _ in range(5):
        core.lost(generation, CloseClass.TRANSIENT, "reset", 0.0)
        core.connect()
        what = core.next(0.0)
        assert isinstance(what, DialNow)
        generation = what.generation
    core.disconnect()
    core.connect()
    what = core.next(0.0)
    assert isinstance(what, DialNow)
    core.lost(what.generation, CloseClass.TRANSIENT, "reset", 0.0)
    assert core.next(0.0) == Wait(1.0)
