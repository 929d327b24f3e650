"""The core of a connection, without I/O: what comes late, twice or out of turn changes nothing."""

from __future__ import annotations

import pytest

from moored.kernel import Clock, Recorder
from moored.rpc import ConnectionConfig
from moored.rpc._core import Actions, ConnectionCore, ShellAct
from moored.rpc._manager_options import ManagerOptions

pytestmark = pytest.mark.pure

ERROR = OSError("refused")


def made() -> ConnectionCore:
    """A connection whose first attempt is under way, and somebody waits for it."""
    config = ConnectionConfig.from_uri("http://north:1")
    core = ManagerOptions().core(config, Clock.system(), Recorder())
    core.open(0.0)
    core.wait(0.0)
    return core


def ready(now: float = 100.0) -> ConnectionCore:
    """One that is connected: generation 1, of attempt 1, proven."""
    core = made()
    core.dialled(1, 0.0)
    core.waiting = 0
    core.used(now)
    return core


def acts(actions: Actions) -> list[ShellAct]:
    return [action.act for action in actions]


def state(core: ConnectionCore) -> str:
    return str(core.machine.state)


def test_a_probe_of_an_old_generation_changes_nothing() -> None:
    core = ready(0.0)
    assert acts(core.requested(100.0)) == [ShellAct.PROBE]
    assert core.probed(0, False, 100.0) == []
    assert state(core) == "ready/probing"
    assert core.probed(1, True, 100.0) == []
    assert state(core) == "ready/serving"


def test_a_probe_that_nobody_waits_for_changes_nothing() -> None:
    core = ready()
    assert core.probed(1, False, 100.0) == []
    assert state(core) == "ready/serving"
    assert core.counters.probes_unhealthy == 0


def test_an_error_of_an_old_generation_is_counted_and_does_nothing() -> None:
    core = ready()
    assert core.broken(0, ERROR, 100.0) == []
    assert (state(core), core.counters.stale_errors) == ("ready/serving", 1)


def test_a_second_error_of_a_generation_that_is_being_replaced_does_nothing() -> None:
    core = ready()
    assert acts(core.broken(1, ERROR, 100.0)) == [ShellAct.DIAL]
    assert core.broken(1, ERROR, 100.0) == []
    assert core.counters.recoveries == 1


def test_a_connection_that_seems_to_live_is_looked_at_once() -> None:
    core = ready()
    assert acts(core.broken(1, ERROR, 100.0, connected=True)) == [ShellAct.CHECK]
    assert core.broken(1, ERROR, 100.0, connected=True) == []
    assert core.checked(0, False, 100.0) == [], "another generation was looked at"
    assert core.broken(1, ERROR, 100.0, connected=True) == [], "it is looked at still"
    assert state(core) == "ready/serving"
    assert core.checked(1, True, 100.0) == []
    assert (state(core), core.counters.unavailable_answers) == ("ready/serving", 1)
    assert acts(core.broken(1, ERROR, 100.0, connected=True)) == [ShellAct.CHECK]
    assert acts(core.checked(1, False, 100.0)) == [ShellAct.DIAL]
    assert core.checked(1, False, 100.0) == []


def test_a_look_that_comes_after_the_generation_was_replaced_changes_nothing() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0, connected=True)
    core.broken(1, ERROR, 100.0)
    core.dialled(2, 100.0)
    assert core.checked(1, False, 100.1) == []
    assert state(core) == "ready/serving"


def test_what_an_attempt_brings_after_it_was_given_up_is_discarded() -> None:
    core = ready()
    assert acts(core.dialled(1, 100.0)) == [ShellAct.DISCARD]
    assert core.generation == 1
    closed = made()
    closed.close("enough")
    assert acts(closed.dialled(1, 0.0)) == [ShellAct.DISCARD]
    assert closed.closed


def test_the_end_of_an_old_attempt_changes_nothing() -> None:
    for end in (ConnectionCore.failed, ConnectionCore.failed_for_good, ConnectionCore.refused):
        core = ready()
        assert end(core, 1, ERROR, 100.0) == []
        assert (state(core), core.counters.connect_failures) == ("ready/serving", 0)
        core.broken(1, ERROR, 100.0)
        assert end(core, 1, ERROR, 100.0) == [], "attempt 2 is under way"
        assert state(core) == "recovering/dialling"


def test_only_the_attempt_under_way_can_keep_the_connection() -> None:
    core = ready()
    assert core.kept(1, 100.0) == []
    core.broken(1, ERROR, 100.0)
    core.kept(1, 100.0)
    assert state(core) == "recovering/dialling"
    core.kept(2, 100.0)
    assert state(core) == "ready/serving"
    first = made()
    first.kept(1, 0.0)
    assert state(first) == "connecting/dialling", "there is nothing to keep"


def test_an_old_channel_is_renewed_only_while_it_serves() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    assert core.aged(100.0) == []
    assert state(core) == "recovering/dialling"


def test_a_renewal_that_fails_leaves_the_channel_in_use() -> None:
    for end in (ConnectionCore.failed, ConnectionCore.failed_for_good, ConnectionCore.refused):
        core = ready()
        assert acts(core.aged(100.0)) == [ShellAct.DIAL]
        assert end(core, 2, ERROR, 100.0) == []
        assert state(core) == "ready/serving"
        assert core.verdict is None


def test_an_error_while_a_renewal_is_under_way_starts_no_second_attempt() -> None:
    core = ready()
    core.aged(100.0)
    assert core.broken(1, ERROR, 100.0) == []
    assert state(core) == "recovering/dialling"


def test_a_caller_never_puts_the_next_attempt_off() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    core.wait(100.0)
    (timer,) = core.failed(2, ERROR, 100.0)
    assert core.wait(100.0) == []
    assert acts(core.due(100.0 + timer.delay)) == [ShellAct.DIAL]


def test_a_timer_without_a_wait_does_nothing() -> None:
    core = ready()
    assert core.due(200.0) == []
    assert core.wait(200.0) == []


def test_it_is_closed_once() -> None:
    core = ready()
    assert acts(core.close("enough")) == [ShellAct.CANCEL_TIMER, ShellAct.CLOSE, ShellAct.WAKE]
    assert core.close("enough") == []


def test_a_refusal_holds_until_its_pause_has_ended() -> None:
    core = ready()
    core.broken(1, ERROR, 100.0)
    timer, wake = core.refused(2, ERROR, 100.0)
    assert (timer.act, wake.act) == (ShellAct.SET_TIMER, ShellAct.WAKE)
    assert acts(core.wait(100.0)) == [ShellAct.WAKE], "who comes is told"
    assert acts(core.wait(100.0 + timer.delay)) == [ShellAct.SET_TIMER]


def test_a_first_attempt_that_nobody_waits_for_is_given_up() -> None:
    core = made()
    core.wait(0.0)
    assert core.leave(0.0) == [], "one still waits"
    assert ShellAct.CLOSE in acts(core.leave(0.0))
    known = ready()
    known.broken(1, ERROR, 100.0)
    known.wait(100.0)
    assert known.leave(100.0) == [], "one that had a channel goes on"
