"""The session core: when it dials, how long it waits, and when it stops."""

from __future__ import annotations

import random

import pytest

from moored.kernel import At, Backoff, Clock, Dial, Machine, Reconnect, Recorder
from moored.sessions import CloseClass
from moored.sessions.link._core import CHART, PAUSES, RESTARTS, SessionCore

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
    return SessionCore(Reconnect(machine, PAUSES, Backoff(1.0, 60.0, clock=clock)))


def online(core: SessionCore, now: float = 0.0) -> int:
    """Bring the core online, and return the generation of its link."""
    core.connect(0.0)
    what = core.link.due(now)
    assert isinstance(what, Dial)
    assert core.dialed(what.number)
    assert core.ready(what.number, now)
    return what.number


def test_core_dials_once_and_then_is_idle(core: SessionCore) -> None:
    assert core.link.due(0.0) is None
    core.connect(0.0)
    assert core.link.due(0.0) == Dial(1)
    assert core.link.due(0.0) is None
    assert core.dialed(1)
    assert core.link.due(0.0) is None
    assert core.ready(1, 0.0)
    assert core.online
    assert core.link.due(99.0) is None


def test_transient_losses_are_retried_forever_with_growing_pauses(core: SessionCore) -> None:
    online(core)
    now, pauses = 0.0, []
    for generation in range(1, 12):
        assert core.lost(generation, CloseClass.TRANSIENT, "reset", now)
        assert not core.online
        waiting = core.link.due(now)
        assert isinstance(waiting, At)
        pauses.append(waiting.time - now)
        assert core.link.due(waiting.time - 0.001) == waiting
        now = waiting.time
        assert core.link.due(now) == Dial(generation + 1)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


def test_only_a_link_that_lasted_resets_the_backoff(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TRANSIENT, "reset", 0.1)
    assert core.link.due(0.1) == At(1.1)
    core.link.due(1.1)
    core.dialed(2)
    core.ready(2, 2.0)
    core.lost(2, CloseClass.TRANSIENT, "reset", 2.0 + PAUSES.proven - 0.1)
    assert core.link.due(6.9) == At(6.9 + 2.0)
    core.link.due(9.0)
    core.dialed(3)
    core.ready(3, 10.0)
    core.lost(3, CloseClass.TRANSIENT, "reset", 10.0 + PAUSES.proven)
    assert core.link.due(15.0) == At(16.0)


def test_link_marked_as_proven_resets_the_backoff(core: SessionCore) -> None:
    pauses = []
    for _ in range(3):
        generation = online(core, 0.0)
        core.link.proven(core.link.number)
        core.lost(generation, CloseClass.TRANSIENT, "more is to come", 0.1)
        pauses.append(core.next_attempt_in(0.1))
        core.connect(0.0)
    assert len(set(pauses)) == 1


def test_restart_is_immediate_and_not_counted_as_an_attempt(core: SessionCore) -> None:
    online(core)
    assert core.lost(1, CloseClass.RESTART, "515", 0.0)
    assert core.restarting
    assert core.link.due(0.0) == Dial(2)
    assert core.link.backoff.attempts == 0
    assert core.dialed(2)
    assert core.restarting
    assert core.ready(2, 0.0)
    assert not core.restarting


def test_repeated_restarts_wait_after_the_limit(core: SessionCore) -> None:
    online(core)
    for generation in range(1, RESTARTS + 1):
        core.lost(generation, CloseClass.RESTART, "515", 0.0)
        assert core.link.due(0.0) == Dial(generation + 1)
        core.dialed(generation + 1)
    core.lost(RESTARTS + 1, CloseClass.RESTART, "515", 0.0)
    assert core.link.due(0.0) == At(1.0)
    assert not core.restarting


def test_retry_after_of_the_server_extends_the_pause(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TRANSIENT, "busy", 0.0, retry_after=30.0)
    assert core.link.due(0.0) == At(30.0)


@pytest.mark.parametrize("kind", FINAL)
def test_final_close_dials_nothing_until_connect(core: SessionCore, kind: CloseClass) -> None:
    online(core)
    assert core.lost(1, kind, "conflict", 0.0)
    assert core.link.machine.at("off/refused")
    assert core.link.due(1e9) is None
    assert core.last_kind is kind
    core.connect(0.0, "the user has logged in again")
    assert core.link.due(1e9) == Dial(2)


def test_events_of_an_old_link_change_nothing(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.RESTART, "515", 0.0)
    core.link.due(0.0)
    assert not core.lost(1, CloseClass.TAKEOVER, "conflict", 0.0)
    assert not core.ready(1, 0.0)
    assert not core.dialed(1)
    assert not core.login(1, "code")
    assert core.dialed(2)
    assert not core.lost(1, CloseClass.BANNED, "banned", 0.0)
    assert core.ready(2, 0.0)


def test_repeated_events_of_a_link_change_nothing(core: SessionCore) -> None:
    core.connect(0.0)
    assert core.link.due(0.0) == Dial(1)
    assert core.dialed(1)
    assert not core.dialed(1)
    assert core.ready(1, 0.0)
    assert not core.ready(1, 1.0)
    assert not core.login(1, "code")
    assert not core.dialed(1)
    assert core.reconnects == 0
    assert core.lost(1, CloseClass.TRANSIENT, "closed", 2.0)
    assert not core.lost(1, CloseClass.BANNED, "banned", 2.0)
    assert core.link.machine.at("down/waiting")


def test_second_end_of_a_refused_link_changes_nothing(core: SessionCore) -> None:
    generation = online(core)
    assert core.lost(generation, CloseClass.TAKEOVER, "conflict", 0.0)
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert core.link.machine.at("off/refused")
    assert core.why == (CloseClass.TAKEOVER, "conflict")


def test_dial_from_before_a_disconnect_does_not_count_for_the_next_connect(
    core: SessionCore,
) -> None:
    core.connect(0.0)
    assert core.link.due(0.0) == Dial(1)
    core.disconnect()
    core.connect(0.0)
    assert not core.dialed(1)
    assert isinstance(core.link.due(0.0), Dial)


def test_disconnected_core_rests_and_ignores_its_old_link(core: SessionCore) -> None:
    generation = online(core)
    core.disconnect()
    assert core.link.machine.at("off/resting")
    assert not core.lost(generation, CloseClass.TRANSIENT, "closed", 0.0)
    assert core.link.due(1e9) is None


def test_dial_that_succeeds_after_a_disconnect_is_discarded(core: SessionCore) -> None:
    core.connect(0.0)
    assert core.link.due(0.0) == Dial(1)
    core.disconnect()
    assert not core.dialed(1)


def test_login_may_take_several_steps(core: SessionCore) -> None:
    core.connect(0.0)
    core.link.due(0.0)
    core.dialed(1)
    assert core.login(1, "pairing code")
    assert core.login(1, "another pairing code")
    assert core.ready(1, 0.0)
    assert not core.login(1, "too late")


def test_crashed_core_reconnects_by_itself(core: SessionCore) -> None:
    online(core)
    core.crashed("defect", 0.0)
    assert core.link.due(0.0) == At(1.0)
    assert not core.ready(1, 1.0), "the crash has ended link 1"
    assert core.link.due(1.0) == Dial(2)


def test_crash_does_not_reconnect_a_refused_core(core: SessionCore) -> None:
    online(core)
    core.lost(1, CloseClass.TAKEOVER, "conflict", 0.0)
    core.crashed("defect", 0.0)
    assert core.link.due(1e9) is None


def test_stopped_core_stays_stopped(core: SessionCore) -> None:
    online(core)
    core.stop("the user stopped it")
    core.stop("again")
    core.connect(0.0)
    assert core.stopped
    assert core.link.due(1e9) is None
    assert not core.lost(1, CloseClass.TRANSIENT, "closed", 0.0)


def lost_once(core: SessionCore) -> None:
    """Let the first attempt fail, so that the core waits until 1.0."""
    core.connect(0.0)
    assert core.link.due(0.0) == Dial(1)
    assert core.lost(1, CloseClass.TRANSIENT, "refused", 0.0)
    assert core.link.due(0.0) == At(1.0)


def test_connect_during_a_pause_dials_immediately(core: SessionCore) -> None:
    lost_once(core)
    core.connect(0.0, "the user connected it")
    assert core.link.due(0.1) == Dial(2)
    core.connect(0.0, "the user connected it")
    assert core.link.due(0.1) is None, "a dial is in progress"
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 0.2)
    assert core.link.due(0.2) == At(0.2 + 2.0), "connect() must not reset the backoff"


def test_event_of_a_link_that_was_not_dialed_changes_nothing(core: SessionCore) -> None:
    lost_once(core)
    core.connect(0.0, "the user connected it")
    assert not core.lost(1, CloseClass.BANNED, "banned", 0.1)
    assert core.link.due(0.1) == Dial(2)


def test_reconnects_counts_only_becoming_online_again(core: SessionCore) -> None:
    lost_once(core)
    core.link.due(1.0)
    core.dialed(2)
    assert core.reconnects == 0
    core.ready(2, 1.0)
    assert core.reconnects == 0
    core.lost(2, CloseClass.RESTART, "515", 2.0)
    assert core.link.due(2.0) == Dial(3)
    core.dialed(3)
    assert core.reconnects == 0
    core.ready(3, 2.0)
    assert core.reconnects == 1


def test_reason_is_empty_while_online(core: SessionCore) -> None:
    lost_once(core)
    whys = [core.why]
    core.link.due(1.0)
    whys.append(core.why)
    core.dialed(2)
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
    core.link.due(9.0)
    assert core.next_attempt_in(9.0) is None
    core.dialed(2)
    core.ready(2, 9.0)
    assert core.next_attempt_in(9.0) is None


def test_max_attempts_ends_in_offline_refused(core: SessionCore) -> None:
    core.link.backoff.max_attempts = 2
    online(core)
    assert core.lost(1, CloseClass.TRANSIENT, "reset", 0.0)
    assert core.link.due(1.0) == Dial(2)
    assert core.lost(2, CloseClass.TRANSIENT, "refused", 1.0)
    assert core.link.machine.at("off/refused")
    assert core.why == (CloseClass.TRANSIENT, "given up after attempt 2: refused")
    assert core.link.due(99.0) is None
    # connect() starts a new series of attempts.
    core.connect(0.0)
    assert core.link.due(99.0) == Dial(3)
    assert core.lost(3, CloseClass.TRANSIENT, "refused", 99.0)
    assert core.link.due(99.0) == At(100.0)
    core.crashed("a defect", 99.0)
    assert core.link.due(100.0) == Dial(4)
    core.crashed("a defect", 100.0)
    assert core.link.machine.at("off/refused")


def test_crash_after_a_link_that_lasted_has_a_short_pause(core: SessionCore) -> None:
    online(core)
    for generation in range(1, 6):
        core.lost(generation, CloseClass.TRANSIENT, "reset", 0.0)
        core.connect(0.0)
        core.link.due(0.0)
    core.dialed(6)
    core.ready(6, 0.0)
    core.crashed("a defect", PAUSES.proven)
    assert core.link.due(PAUSES.proven) == At(PAUSES.proven + 1.0)


def test_disconnect_and_connect_reset_the_backoff(core: SessionCore) -> None:
    generation = online(core)
    for _ in range(5):
        core.lost(generation, CloseClass.TRANSIENT, "reset", 0.0)
        core.connect(0.0)
        what = core.link.due(0.0)
        assert isinstance(what, Dial)
        generation = what.number
    core.disconnect()
    core.connect(0.0)
    what = core.link.due(0.0)
    assert isinstance(what, Dial)
    core.lost(what.number, CloseClass.TRANSIENT, "reset", 0.0)
    assert core.link.due(0.0) == At(1.0)
