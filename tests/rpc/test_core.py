"""The core of a connection, without I/O: late, repeated or stale events change nothing."""

from __future__ import annotations

import pytest

from moored.kernel import Clock, Recorder
from moored.rpc._core import Actions, ConnectionCore, ShellAct
from moored.rpc._verdicts import Verdict

pytestmark = pytest.mark.pure

ERROR = OSError("refused")


def made() -> ConnectionCore:
    """Return a core whose first attempt is in progress, with one waiting caller."""
    core = ConnectionCore("north:1", Clock.system(), Recorder())
    core.open(0.0)
    core.wait(0.0)
    return core


def ready(now: float = 100.0) -> ConnectionCore:
    """Return a core that is connected: generation 1, of attempt 1, proven."""
    core = made()
    core.dialled(1, 0.0)
    core.waiting = 0
    core.last_used_at = now
    return core


def acts(actions: Actions) -> list[ShellAct]:
    return [action.act for action in actions]


def state(core: ConnectionCore) -> str:
    return str(core.machine.state)


def test_probe_of_an_old_generation_changes_nothing() -> None:
    core = ready(0.0)
    assert acts(core.requested(100.0)) == [ShellAct.PROBE]
    assert core.probed(0, False, 100.0) == []
    assert state(core) == "ready/probing"
    assert core.probed(1, True, 100.0) == []
    assert state(core) == "ready/serving"


def test_probe_result_outside_of_a_probe_changes_nothing() -> None:
    core = ready()
    assert core.probed(1, False, 100.0) == []
    assert state(core) == "ready/serving"
    assert core.counters.probes_unhealthy == 0


def test_error_of_an_old_generation_is_counted_and_ignored() -> None:
    core = ready()
    assert core.broken(0, ERROR, 100.0) == []
    assert (state(core), core.counters.stale_errors) == ("ready/serving", 1)


def test_second_error_of_a_generation_that_is_being_replaced_is_ignored() -> None:
    core = ready()
    assert acts(core.broken(1, ERROR, 100.0)) == [ShellAct.DIAL]
    assert core.broken(1, ERROR, 100.0) == []
    assert core.counters.recoveries == 1


def test_connection_that_seems_up_is_checked_once() -> None:
    core = ready()
    assert acts(core.broken(1, ERROR, 100.0, connected=True)) == [ShellAct.CHECK]
    assert core.broken(1, ERROR, 100.0, connected=True) == []
    assert core.checked(0, False, 100.0) == [], "a check of another generation was accepted"
    assert core.broken(1, ERROR, 100.0, connected=True) == [], "a second check was started"
    assert state(core) == "ready/serving"
    assert core.checked(1, True, 100.0) == []
    assert (state(core), core.counters.unavailable_answers) == ("ready/serving", 1)
    assert acts(core.broken(1, ERROR, 100.0, connected=True)) == [ShellAct.CHECK]
    assert acts(core.checked(1, False, 100.0)) == [ShellAct.DIAL]
    assert core.checked(1, False, 100.0) == []


def test_check_of_a_replaced_generation_changes_nothing() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0, connected=True)
    core.broken(1, ERROR, 100.0)
    core.dialled(2, 100.0)
    assert core.checked(1, False, 100.1) == []
    assert state(core) == "ready/serving"


def test_result_of_an_abandoned_attempt_is_discarded() -> None:
    core = ready()
    assert core.dialled(1, 100.0) is None
    assert core.generation == 1
    closed = made()
    closed.close("enough")
    assert closed.dialled(1, 0.0) is None
    assert closed.closed


def test_end_of_an_old_attempt_changes_nothing() -> None:
    for verdict in Verdict:
        core = ready()
        assert core.failed(1, ERROR, 100.0, verdict) == []
        assert (state(core), core.counters.connect_failures) == ("ready/serving", 0)
        core.broken(1, ERROR, 100.0)
        assert core.failed(1, ERROR, 100.0, verdict) == [], "attempt 2 is in progress"
        assert state(core) == "recovering/dialling"


def test_only_the_current_attempt_can_keep_the_connection() -> None:
    core = ready()
    assert core.kept(1, 100.0) == []
    core.broken(1, ERROR, 100.0)
    core.kept(1, 100.0)
    assert state(core) == "recovering/dialling"
    core.kept(2, 100.0)
    assert state(core) == "ready/serving"
    first = made()
    first.kept(1, 0.0)
    assert state(first) == "connecting/dialling", "a connection without a channel was kept"


def test_channel_is_renewed_only_while_serving() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    assert core.aged(100.0) == []
    assert state(core) == "recovering/dialling"


def test_failed_renewal_leaves_the_channel_in_use() -> None:
    for verdict in Verdict:
        core = ready()
        assert acts(core.aged(100.0)) == [ShellAct.DIAL]
        assert core.failed(2, ERROR, 100.0, verdict) == []
        assert state(core) == "ready/serving"
        assert core.verdict is None


def test_error_during_a_renewal_starts_no_second_attempt() -> None:
    core = ready()
    core.aged(100.0)
    assert core.broken(1, ERROR, 100.0) == []
    assert state(core) == "recovering/dialling"


def test_new_caller_never_postpones_the_next_attempt() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    core.wait(100.0)
    (timer,) = core.failed(2, ERROR, 100.0)
    assert core.wait(100.0) == []
    assert acts(core.due(100.0 + timer.delay)) == [ShellAct.DIAL]


def test_timer_without_a_wait_does_nothing() -> None:
    core = ready()
    assert core.due(200.0) == []
    assert core.wait(200.0) == []


def test_core_is_closed_once() -> None:
    core = ready()
    assert acts(core.close("enough")) == [ShellAct.CANCEL_TIMER, ShellAct.CLOSE, ShellAct.WAKE]
    assert core.close("enough") == []


def test_refusal_lasts_until_its_pause_ends() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    timer, wake = core.failed(2, ERROR, 100.0, Verdict.REFUSED)
    assert (timer.act, wake.act) == (ShellAct.SET_TIMER, ShellAct.WAKE)
    assert acts(core.wait(100.0)) == [ShellAct.WAKE], "a new caller was not woken"
    assert acts(core.wait(100.0 + timer.delay)) == [ShellAct.SET_TIMER]


def test_first_attempt_without_waiting_callers_is_abandoned() -> None:
    core = made()
    core.wait(0.0)
    assert core.leave(0.0) == [], "another caller still waits"
    assert ShellAct.CLOSE in acts(core.leave(0.0))
    known = ready()
    known.broken(1, ERROR, 100.0)
    known.wait(100.0)
    assert known.leave(100.0) == [], "a recovery must continue without callers"


def test_first_attempt_of_a_channel_that_a_client_holds_is_not_abandoned() -> None:
    core = made()
    core.lasting = True
    assert core.leave(0.0) == []
    timer, wake = core.failed(1, ERROR, 0.0, Verdict.MISTAKE)
    assert (timer.act, wake.act) == (ShellAct.SET_TIMER, ShellAct.WAKE)
    assert acts(core.due(timer.delay)) == [ShellAct.DIAL]
