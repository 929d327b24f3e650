"""Simulated schedules: instances compete for one server while faults are injected.

The simulation and its faults are in `_manager_world` and `scripted_server`, the invariants in
`_manager_watcher`; here are the schedules, and the planted defects that they must detect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.logs import silent
from tests.mutants import planted_defects
from tests.reached import assert_reached
from tests.soaking import some_of

from moored.kernel import StatusMonitor
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._integrity import Integrity
from moored.postgres.consume._progress import Progress
from moored.postgres.decode._wire import PrimaryKeepalive
from moored.postgres.manage._manager import Manager
from moored.postgres.manage._manager_core import Act, Action, Actions, ManagerCore, Timer
from moored.postgres.server._setup import Setup, Step
from moored.postgres.stream._positions import Positions
from moored.testing import Mutant, assert_caught, base_seed, mutant, run_one, scaled, simulate

from ._manager_seams import a_bad_day, seams
from ._manager_watcher import STEPS


@pytest.fixture(autouse=True)
def scripted() -> Iterator[None]:
    """The scripted server in the place of a real one, and no log: thousands of bad days."""
    with silent("moored"), seams():
        yield


# A fifth at a time: each part ends within a test's time.
@pytest.mark.parametrize("part", some_of(range(5), 0, 1))
def test_random_faults_break_no_invariant(part: int) -> None:
    each = scaled(1000, least=10)
    report = simulate(a_bad_day, each, first_seed=base_seed() + part * each)
    assert report.distinct == report.schedules


def test_random_faults_with_inexact_timers_break_no_invariant() -> None:
    simulate(a_bad_day, scaled(500, least=4), first_seed=base_seed(), timer_slack=0.002)


def test_the_schedules_reach_every_kind_of_fault() -> None:
    """Every kind of trouble, every step and every way to fail is met within a few dozen."""
    wanted = {f"at {step}" for step in STEPS} | {
        "client failed: in place",
        "client failed: RESTART",
        "client failed: DROP_SLOT",
        "client failed: GIVE_UP",
        "a consumer crashed",
        "a full disk",
        "a fatal end",
        "a reset was told",
        "it slept",
        "the stream was proven",
    }
    assert_reached(a_bad_day, wanted | {"a transaction came"}, within=60)


def test_a_schedule_repeats_itself() -> None:
    first, second = (run_one(a_bad_day, 7) for _ in range(2))
    assert first.digest == second.digest


# -- defects that must be noticed --------------------------------------------------------------


def _locked_too_early(self: ManagerCore, step: Step) -> Actions:
    """A request for the lock is taken for the lock."""
    actions = _client_at(self, step)
    if step is Step.ACQUIRE_LOCK:
        actions += self._locked()
    return actions


def _streams_without_lock(self: Setup, sqlstate: str | None, error: Exception) -> None:
    """A statement timeout is taken for the lock."""
    if self.step is Step.ACQUIRE_LOCK and sqlstate == "57014":
        self._advance()
        return
    _refused(self, sqlstate, error)


def _proven_at_once(self: ManagerCore) -> Actions:
    """The first message is taken for a stream that works."""
    actions = _first_message(self)
    if actions:
        self.backoff.succeed()
    return actions


def _flushes_what_was_seen(self: Hub) -> int:
    """What was received is taken for safe."""
    return self.seen or 0


def _flushes_inside(self: Positions, keepalive: PrimaryKeepalive, *, inside: bool) -> bool:
    """A keepalive in the middle of a transaction is taken for one after it."""
    return _keepalive(self, keepalive, inside=False)


def _ignores_gaps(self: Progress, end: int) -> bool:
    """The last acknowledgement counts, whatever was not acknowledged before it."""
    self._open.discard(end)
    while self._pending and abs(self._pending[0]) <= end:
        self._open.discard(self._pending.popleft())
    moved, self.acknowledged = end > self.acknowledged, max(end, self.acknowledged)
    return moved


def _keeps_the_lock_in_mind(self: ManagerCore, *args: object) -> Actions:
    """A retry does not clear the condition of the lock."""
    actions = _retry(self, *args)  # type: ignore[arg-type]
    return [a for a in actions if (a.act, a.name) != (Act.CLEAR, "pg_lock_acquired")]


def _rewinds_as_if_nothing_were(self: ManagerCore) -> Actions:
    """A rewind does not clear the conditions."""
    return [action for action in _rewind(self) if action.act is not Act.CLEAR]


def _tries_anything_in_place(self: ManagerCore, *args: object) -> Actions:
    """Whatever has failed, only the replication client is started again."""
    diagnosis = args[-1]
    self.machine.move("connection_setup", cause="a defect")
    wait = self.backoff.fail()
    return [self._error_event(diagnosis, wait), Action(Act.SET_TIMER, Timer.RETRY.value, wait)]  # type: ignore[arg-type]


async def _waits_for_ever(self: Manager) -> None:
    """Every part is waited for until it has ended, however long that takes."""
    self._timers.cancel_all()
    self._clear_conditions("it stops")
    for runner in list(self._parts._supervisor._runners.values()):
        runner.child = replace(runner.child, shutdown=math.inf)
        await self._parts.stop(runner.name)


async def _confirms_before_it_stores(self: Hub, end: int) -> None:
    """Positions are confirmed to the server and never stored."""


def _finds_no_difference(self: Integrity, *args: object) -> None:
    """A recreated or moved slot is taken for the known one."""


def _misses_a_change(self: StatusMonitor[object]) -> None:
    """The status is computed when a pool changes, and not otherwise."""
    if any(c.met for name, c in self._conditions.items() if "pool" in name):
        _evaluate(self)


_client_at, _first_message = ManagerCore.client_at, ManagerCore.first_message
_retry, _rewind = ManagerCore._retry, ManagerCore.rewind
_refused, _keepalive = Setup.refused, Positions.keepalive
_evaluate = StatusMonitor._evaluate

MUTANTS = [
    mutant(ManagerCore, "client_at", _locked_too_early, name="a lock before it is granted"),
    mutant(Setup, "refused", _streams_without_lock, name="a timeout taken for the lock"),
    mutant(ManagerCore, "first_message", _proven_at_once, name="proven at once"),
    mutant(Hub, "flushed", _flushes_what_was_seen, name="flushed is what was seen"),
    mutant(Positions, "keepalive", _flushes_inside, name="flushed within a transaction"),
    mutant(Progress, "ack", _ignores_gaps, name="a gap in the acknowledgements"),
    mutant(Hub, "checkpoint", _confirms_before_it_stores, name="confirmed before it is stored"),
    mutant(ManagerCore, "_retry", _keeps_the_lock_in_mind, name="a condition not cleared"),
    mutant(ManagerCore, "rewind", _rewinds_as_if_nothing_were, name="a rewind in secret"),
    mutant(ManagerCore, "_restart", _tries_anything_in_place, name="anything tried in place"),
    mutant(StatusMonitor, "_evaluate", _misses_a_change, name="a status of yesterday"),
    mutant(Manager, "_shut_down", _waits_for_ever, name="a shutdown without limit"),
    mutant(Integrity, "difference", _finds_no_difference, name="another history in silence"),
]


@pytest.mark.parametrize(
    "planted", planted_defects(MUTANTS, "a timeout taken for the lock", "a shutdown without limit")
)
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    caught = assert_caught(a_bad_day, planted, within=300, clean=0)
    assert isinstance(caught.error, AssertionError), caught
