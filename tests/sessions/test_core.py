"""The session core: when it dials, how long it waits, and when it stops."""

from __future__ import annotations

import random

import pytest

from moored.kernel import Backoff, Clock, Machine, Recorder
from moored.sessions import CloseClass
from moored.sessions.link._core import CHART, PROVEN, RESTARTS, DialNow, SessionCore, Wait

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
    """Bring the core online, and return the generation of its link."""
    core.connect()
    what = core.next(now)
    assert isinstance(what, DialNow)
    assert core.dialled(what.generation)
    assert core.ready(what.generation, now)
    return what.generation


def test_core_dials_once_and_then_is_idle(core: SessionCore) -> None:
    assert core.next(0.0) is None
    core.connect()
    assert core.next(0.0) == DialNow(1)
    assert core.next(0.0) is None
    assert core.dialled(1)
    assert core.next(0.0) is None
    assert core.ready(1, 0.0)
    assert core.online
    assert core.next(99.0) is None


def test_transient_losses_are_retried_forever_with_growing_pauses(core: SessionCore) -> None:
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


def test_only_a_link_that_lasted_resets_the_backoff(core: SessionCore) -> None:
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


def test_link_marked_as_proven_resets_the_backoff(core: SessionCore) -> None:
    pauses = []
    for _ in range(3):
        generation = online(core, 0.0)
        core.proven()
        core.lost(generation, CloseClass.TRANSIENT, "more is to come", 0.1)
        pauses.append(core.next_attempt_in(0.1))
        core.connect()
    assert len(set(pauses)) == 1


def test_restart_is_immediate_and_not_counted_as_an_attempt(core: SessionCore) -> None:
    online(core)
    assert core.lost(1, CloseClass.RESTART, "515", 0.0)
    assert core.restarting
    assert core.next(0.0) == DialNow(2)
    assert core.backoff.attempts == 0
    assert core.dialled(2)
    assert core.restarting
    assert core.ready(2, 0.0)
    assert not core.restarting


def test_repeated_restarts_wait_after_the_limit(core: SessionCore) -> None:
    online(core)
    for generation in range(1, RESTARTS + 1):
        core.lost(generation, CloseClass.RESTART, "515", 0.0)
        assert core.next(0.0) == DialNow(generation + 1)
        core.dialled(generation + 1)
    core.lost(RESTARTS + 1, CloseClass.RESTART, "515", 0.0)
    assert core.next(0.0) == Wait(1.0)
    assert not core.restarting


def test_retry_after_of_the_server_extends_the_pause(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TRANSIENT, "busy", 0.0, retry_after=30.0)
    assert core.next(0.0) == Wait(30.0)


@pytest.mark.parametrize("kind", FINAL)
def test_final_close_dials_nothing_until_connect(core: SessionCore, kind: CloseClass) -> None:
    online(core)
    assert core.lost(1, kind, "conflict", 0.0)
    assert core.machine.at("offline/refused")
    assert core.next(1e9) is None
    assert core.last_kind is kind
    core.connect("the user has logged in again")
    assert core.next(1e9) == DialNow(2)


def test_events_of_an_old_link_change_nothing(core: SessionCore) -> None:
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


def test_repeated_events_of_a_link_change_nothing(core: SessionCore) -> None:
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
    assert core.machine.at("connecting/waiting")


def test_second_end_of_a_refused_link_changes_nothing(core: SessionCore) -> None:
    generation = online(core)
    assert core.lost(generation, CloseClass.TAKEOVER, "conflict", 0.0)
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert core.machine.at("offline/refused")
    assert core.why == (CloseClass.TAKEOVER, "conflict")


def test_dial_from_before_a_disconnect_does_not_count_for_the_next_connect(
    core: SessionCore,
) -> None:
    core.connect()
    assert core.next(0.0) == DialNow(1)
    core.disconnect()
    core.connect()
    assert not core.dialled(1)
    assert isinstance(core.next(0.0), DialNow)


def test_disconnected_core_rests_and_ignores_its_old_link(core: SessionCore) -> None:
    generation = online(core)
    core.disconnect()
    assert core.machine.at("offline/resting")
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert core.next(1e9) is None


def test_dial_that_succeeds_after_a_disconnect_is_discarded(core: SessionCore) -> None:
    core.connect()
    assert core.next(0.0) == DialNow(1)
    core.disconnect()
    assert not core.dialled(1)


def test_login_may_take_several_steps(core: SessionCore) -> None:
    core.connect()
    core.next(0.0)
    core.dialled(1)
    assert core.login(1, "pairing code")
    assert core.login(1, "another pairing code")
    assert core.ready(1, 0.0)
    assert not core.login(1, "too late")


def test_crashed_core_reconnects_by_itself(core: SessionCore) -> None:
    online(core)
    core.crashed("defect", 0.0)
    assert core.next(0.0) == Wait(1.0)
    assert core.next(1.0) == DialNow(3)  # the crash has ended the generation of link 1


def test_crash_does_not_reconnect_a_refused_core(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TAKEOVER, "conflict", 0.0)
    core.crashed("defect", 0.0)
    assert core.next(1e9) is None


def test_stopped_core_stays_stopped(core: SessionCore) -> None:
    online(core)
    core.stop("the user stopped it")
    core.stop("again")
    core.connect()
    assert core.stopped
    assert core.next(1e9) is None
    assert not core.lost(1, CloseClass.TRANSIENT, "closed", 0.0)


def lost_once(core: SessionCore) -> None:
    """Let the first attempt fail, so that the core waits until 1.0."""
    core.connect()
    assert core.next(0.0) == DialNow(1)
    assert core.lost(1, CloseClass.TRANSIENT, "refused", 0.0)
    assert core.next(0.0) == Wait(1.0)


def test_connect_during_a_pause_dials_immediately(core: SessionCore) -> None:
    lost_once(core)
    core.connect("the user connected it")
    assert core.next(0.1) == DialNow(2)
    core.connect("the user connected it")
    assert core.next(0.1) is None, "a dial is in progress"
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 0.2)
    assert core.next(0.2) == Wait(0.2 + 2.0), "connect() must not reset the backoff"


def test_event_of_a_link_that_was_not_dialled_changes_nothing(core: SessionCore) -> None:
    lost_once(core)
    core.connect("the user connected it")
    assert not core.lost(1, CloseClass.BANNED, "banned", 0.1)
    assert core.next(0.1) == DialNow(2)


def test_reconnects_counts_only_becoming_online_again(core: SessionCore) -> None:
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


def test_reason_is_empty_while_online(core: SessionCore) -> None:
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


def test_next_attempt_has_a_time_only_in_a_pause(core: SessionCore) -> None:
    assert core.next_attempt_in(0.0) is None
    lost_once(core)
    assert core.next_attempt_in(0.25) == 0.75
    assert core.next_attempt_in(9.0) == 0.0, "the attempt is overdue"
    core.next(9.0)
    assert core.next_attempt_in(9.0) is None
    core.dialled(2)
    core.ready(2, 9.0)
    assert core.next_attempt_in(9.0) is None


def test_max_attempts_ends_in_offline_refused(core: SessionCore) -> None:
    core.backoff.max_attempts = 2
    online(core)
    assert core.lost(1, CloseClass.TRANSIENT, "reset", 0.0)
    assert core.next(1.0) == DialNow(2)
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 1.0)
    assert core.machine.at("offline/refused")
    assert core.why == (CloseClass.TRANSIENT, "given up after attempt 2: refused")
    assert core.next(99.0) is None
    # connect() starts a new series of attempts.
    core.connect()
    assert core.next(99.0) == DialNow(3)
    assert core.lost(3, CloseClass.TRANSIENT, "refused", 99.0)
    assert core.next(99.0) == Wait(100.0)
    core.crashed("a defect", 99.0)
    assert core.next(100.0) == DialNow(5)
    core.crashed("a defect", 100.0)
    assert core.machine.at("offline/refused")


def test_crash_after_a_link_that_lasted_has_a_short_pause(core: SessionCore) -> None:
    online(core)
    for generation in range(1, 6):
        core.lost(generation, CloseClass.TRANSIENT, "reset", 0.0)
        core.connect()
        core.next(0.0)
    core.dialled(6)
    core.ready(6, 0.0)
    core.crashed("a defect", PROVEN)
    assert core.next(PROVEN) == Wait(PROVEN + 1.0)


def test_disconnect_and_connect_reset_the_backoff(core: SessionCore) -> None:
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
