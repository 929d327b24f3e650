"""The manager's decisions, step by step, without a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from moored.kernel import Backoff, Clock, Machine
from moored.postgres.manage._manager_core import Act, Action, ManagerCore, Role, Timer
from moored.postgres.report._health import CONDITIONS
from moored.postgres.report._phases import CHART
from moored.postgres.server._faults import Diagnosis, FaultVerdict
from moored.postgres.server._setup import Step

pytestmark = pytest.mark.pure

LOST = Diagnosis("connection_closed", FaultVerdict.RETRY, "the connection was closed", "")
WRONG = Diagnosis("invalid_username_or_password", FaultVerdict.FATAL, "wrong password", "check it")
GONE = Diagnosis("database_slot_invalidated", FaultVerdict.DROP_SLOT, "the slot is gone", "")

CLIENT_STEPS = (
    Step.CONNECTED,
    Step.IDENTIFY_SYSTEM,
    Step.QUERY_PG_INFO,
    Step.ACQUIRE_LOCK,
    Step.CREATE_PUBLICATION,
    Step.CREATE_SLOT,
    Step.SET_DISPLAY_SETTING,
    Step.READY_TO_STREAM,
)


def core() -> ManagerCore:
    clock = Clock(lambda: 0.0)
    machine = Machine("postgres", CHART, clock=clock)
    return ManagerCore(machine, Backoff(1.0, 10.0, clock=clock))


def acts(actions: list[Action]) -> list[Act]:
    return [action.act for action in actions]


def to(step: str) -> ManagerCore:
    """A core that has come to this step."""
    made = core()
    made.start()
    for each in CLIENT_STEPS:
        if made.machine.at(step):
            return made
        made.client_at(each)
    later: list[Callable[[], object]] = [
        partial(made.pool_ready, Role.ADMIN),
        partial(made.pool_ready, Role.SNAPSHOT),
        made.integrity_checked,
        made.first_message,
    ]
    for act in later:
        if made.machine.at(step):
            return made
        act()
    assert made.machine.at(step)
    return made


def test_the_steps_from_start_to_streaming_are_those_of_the_chart() -> None:
    made = to("streaming")
    way = [str(move.target) for move in made.machine.history]
    assert way == [
        "connection_setup/start_replication_client:connecting",
        "connection_setup/start_replication_client:acquiring_lock",
        "connection_setup/start_replication_client:configuring_connection",
        "connection_setup/start_connection_pool",
        "connection_setup/start_connection_pool:connecting",
        "connection_setup/start_shapes_supervisor",
        "connection_setup/start_replication_client:start_streaming",
        "running/waiting_for_streaming_confirmation",
        "running/streaming",
    ]


def test_the_wait_for_the_lock_is_checked_after_one_second_then_every_ten() -> None:
    made = core()
    made.start()
    actions = made.client_at(Step.ACQUIRE_LOCK)
    assert Action(Act.EMIT, "waiting_for_connection_lock") in actions
    assert Action(Act.SET_TIMER, "lock", 1.0) in actions
    again = made.timer(Timer.LOCK)
    assert again == [Action(Act.BREAK_LOCK), Action(Act.SET_TIMER, "lock", 10.0)]


def test_with_the_lock_its_timer_is_cancelled_and_its_condition_is_set() -> None:
    made = to("start_replication_client:acquiring_lock")
    actions = made.client_at(Step.CREATE_PUBLICATION)
    assert Action(Act.CANCEL_TIMER, "lock") in actions
    assert Action(Act.SET, "pg_lock_acquired") in actions
    assert Action(Act.EMIT, "connection_lock_acquired") in actions
    assert Action(Act.SET_TIMER, "configuration", 10.0) in actions


def test_the_wait_for_a_slot_is_checked() -> None:
    made = to("start_replication_client:configuring_connection")
    assert acts(made.timer(Timer.CONFIGURATION)) == [Act.UNBLOCK_SLOT, Act.SET_TIMER]


def test_the_pool_of_callers_starts_before_the_lock_and_that_of_the_manager_with_it() -> None:
    made = core()
    made.start()
    waiting = made.client_at(Step.ACQUIRE_LOCK)
    assert Action(Act.START_POOL, "snapshot") in waiting
    assert Action(Act.START_POOL, "admin") not in waiting
    for step in CLIENT_STEPS[4:-1]:
        assert Act.START_POOL not in acts(made.client_at(step))
    assert Action(Act.START_POOL, "admin") in made.client_at(Step.READY_TO_STREAM)


def test_a_client_that_is_retried_leaves_the_pool_of_callers_alone() -> None:
    made = to("start_replication_client:acquiring_lock")
    made.client_failed(LOST)
    made.timer(Timer.RETRY)
    assert Act.START_POOL not in acts(made.client_at(Step.ACQUIRE_LOCK))


def test_a_standby_that_was_connected_retries_after_a_fatal_error() -> None:
    made = to("start_replication_client:acquiring_lock")
    made.pool_ready(Role.SNAPSHOT)
    assert acts(made.pool_failed(Role.SNAPSHOT, WRONG)) == [Act.CLEAR]
    made.client_failed(LOST)
    made.timer(Timer.RETRY)
    assert Action(Act.SET_TIMER, "retry", 2.0) in made.client_failed(WRONG)


def test_both_pools_must_be_full() -> None:
    made = to("start_connection_pool:connecting")
    assert Act.CHECK_INTEGRITY not in acts(made.pool_ready(Role.ADMIN))
    assert Act.CHECK_INTEGRITY not in acts(made.pool_ready(Role.ADMIN))
    assert Act.CHECK_INTEGRITY in acts(made.pool_ready(Role.SNAPSHOT))


def test_nothing_is_streamed_before_the_integrity_was_checked() -> None:
    made = to("start_shapes_supervisor")
    actions = made.integrity_checked()
    assert Action(Act.SET, "integrity_checks_passed") in actions
    assert actions.index(Action(Act.SET, "integrity_checks_passed")) < actions.index(
        Action(Act.START_STREAMING)
    )
    assert Action(Act.EMIT, "ready") in actions


def test_the_backoff_is_reset_only_after_five_seconds_of_streaming() -> None:
    made = core()
    made.start()
    made.client_failed(LOST)
    assert made.backoff.attempts == 1
    made.timer(Timer.RETRY)
    for step in CLIENT_STEPS[3:]:
        made.client_at(step)
    made.pool_ready(Role.ADMIN)
    made.pool_ready(Role.SNAPSHOT)
    made.integrity_checked()
    assert Action(Act.SET_TIMER, "liveness", 5.0) in made.first_message()
    assert made.backoff.attempts == 1
    made.timer(Timer.LIVENESS)
    assert made.backoff.attempts == 0


@pytest.mark.parametrize("step", ["connecting", "acquiring_lock", "configuring_connection"])
def test_the_client_is_retried_in_place_while_the_step_is_about_it(step: str) -> None:
    made = to(f"start_replication_client:{step}")
    actions = made.client_failed(LOST)
    assert Act.RESTART not in acts(actions)
    assert Action(Act.SET_TIMER, "retry", 1.0) in actions
    assert made.machine.at("start_replication_client")
    assert acts(made.timer(Timer.RETRY)) == [Act.START_CLIENT]


@pytest.mark.parametrize(
    "step",
    [
        "start_connection_pool:connecting",
        "start_shapes_supervisor",
        "waiting_for_streaming_confirmation",
        "streaming",
    ],
)
def test_a_client_that_fails_at_any_other_step_restarts_everything(step: str) -> None:
    made = to(step)
    actions = made.client_failed(LOST)
    assert acts(actions) == [Act.EMIT, Act.RESTART]
    assert actions[1].delay == 1.0
    made.start("again")
    assert made.machine.at("start_replication_client:connecting")


def test_a_pool_is_retried_in_place_while_the_step_is_about_it() -> None:
    made = to("start_connection_pool:connecting")
    made.pool_ready(Role.SNAPSHOT)
    actions = made.pool_failed(Role.ADMIN, LOST)
    assert Act.RESTART not in acts(actions)
    assert made.machine.at("start_connection_pool")
    assert made.timer(Timer.RETRY) == [Action(Act.START_POOL, "admin")]
    assert made.machine.at("start_connection_pool:connecting")


def test_a_pool_that_fails_while_running_restarts_everything() -> None:
    assert acts(to("streaming").pool_failed(Role.ADMIN, LOST)) == [Act.EMIT, Act.RESTART]


def test_a_repopulating_pool_is_not_a_failure() -> None:
    made = to("streaming")
    assert made.pool_repopulating(Role.SNAPSHOT, "one was lost") == [
        Action(Act.CLEAR, "snapshot_connection_pool_ready", detail="one was lost")
    ]
    assert made.pool_ready(Role.SNAPSHOT) == [Action(Act.SET, "snapshot_connection_pool_ready")]


@pytest.mark.parametrize("step", ["start_replication_client:connecting", "start_shapes_supervisor"])
def test_a_fatal_error_stops_it_before_it_was_active(step: str) -> None:
    actions = to(step).client_failed(WRONG)
    assert acts(actions) == [Act.EMIT, Act.GIVE_UP]
    assert actions[0].name == "config_error"
    assert actions[1].detail == str(WRONG)


def test_a_fatal_error_is_retried_after_it_was_active() -> None:
    made = to("streaming")
    assert acts(made.client_failed(WRONG)) == [Act.EMIT, Act.RESTART]
    made.start("again")
    assert Action(Act.SET_TIMER, "retry", 2.0) in made.client_failed(WRONG)
    assert acts(made.subsystem_failed(WRONG)) == [Act.EMIT, Act.RESTART]


def test_a_fatal_error_of_a_pool_does_not_end_a_working_stream() -> None:
    assert to("streaming").pool_failed(Role.ADMIN, WRONG) == [
        Action(Act.CLEAR, "admin_connection_pool_ready", detail=str(WRONG))
    ]


def test_a_rewind_clears_the_lock_condition_before_the_client_stops() -> None:
    made = to("streaming")
    actions = made.rewind()
    cleared = {action.name for action in actions if action.act is Act.CLEAR}
    assert cleared == {name for name in CONDITIONS if "pool" not in name}
    assert acts(actions)[-2:] == [Act.STOP_CLIENT, Act.START_CLIENT]
    assert Action(Act.CANCEL_TIMER, "liveness") in actions
    assert made.machine.at("start_replication_client:connecting")


def test_a_rewind_before_streaming_does_nothing() -> None:
    assert to("start_shapes_supervisor").rewind() == []


def test_a_slot_that_cannot_be_read_is_dropped() -> None:
    assert acts(to("streaming").client_failed(GONE)) == [Act.EMIT, Act.DROP_SLOT]


def test_the_backoff_grows_to_ten_seconds() -> None:
    made = core()
    waits = []
    for _ in range(6):
        made.start("again")
        made.client_at(Step.ACQUIRE_LOCK)
        made.client_failed(LOST)
        waits.append(made.backoff._base)
        made.timer(Timer.RETRY)
    assert waits[-1] == 10.0


@pytest.mark.parametrize("step", ["start_shapes_supervisor", "streaming"])
def test_a_first_message_has_an_effect_only_while_waiting_for_it(step: str) -> None:
    made = to(step)
    assert made.first_message() == []
    assert made.machine.at(step)
