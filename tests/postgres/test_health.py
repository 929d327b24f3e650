"""Status and health are derived from the conditions."""

from __future__ import annotations

import itertools

import pytest

from moored.kernel import Condition
from moored.postgres.manage._pools import pool_sizes
from moored.postgres.report._health import (
    CONDITIONS,
    ConnectionState,
    Health,
    Persistent,
    Status,
    status_of,
)

pytestmark = pytest.mark.pure


def conditions(*met: str) -> dict[str, Condition]:
    return {name: Condition(name, name in met, 0.0, None) for name in CONDITIONS}


def of(*met: str, asleep: bool = False, loaded: bool = True) -> Status:
    return status_of(conditions(*met), asleep=asleep, loaded=loaded)


def test_there_are_seven_conditions_in_order() -> None:
    assert CONDITIONS == (
        "pg_lock_acquired",
        "replication_client_ready",
        "admin_connection_pool_ready",
        "snapshot_connection_pool_ready",
        "shape_log_collector_ready",
        "supervisor_processes_ready",
        "integrity_checks_passed",
    )


def test_without_the_lock_the_health_is_waiting() -> None:
    assert of().conn is ConnectionState.WAITING_ON_LOCK
    assert of().health is Health.WAITING


def test_a_standby_that_has_not_read_its_state_is_starting() -> None:
    assert of(loaded=False).shape is Persistent.STARTING
    assert of(loaded=False).health is Health.STARTING


def test_with_all_conditions_met_the_health_is_active() -> None:
    assert of(*CONDITIONS) == Status(ConnectionState.UP, Persistent.UP)
    assert of(*CONDITIONS).health is Health.ACTIVE


@pytest.mark.parametrize("missing", CONDITIONS)
def test_with_one_condition_missing_the_health_is_not_active(missing: str) -> None:
    assert of(*(set(CONDITIONS) - {missing})).health is not Health.ACTIVE


POOLS = {"admin_connection_pool_ready", "snapshot_connection_pool_ready"}


def test_the_health_is_degraded_only_if_nothing_but_pools_is_missing() -> None:
    for number in range(len(CONDITIONS) + 1):
        for missing in map(set, itertools.combinations(CONDITIONS, number)):
            status = of(*(set(CONDITIONS) - missing))
            assert (status.health is Health.DEGRADED) == (bool(missing) and missing <= POOLS)
            # The two values that load balancers rely on stay as they are.
            assert (status.conn is ConnectionState.UP) == missing.isdisjoint(
                {*POOLS, "pg_lock_acquired", "replication_client_ready", "integrity_checks_passed"}
            )


def test_asleep_the_health_is_sleeping_whatever_the_conditions() -> None:
    for number in range(len(CONDITIONS) + 1):
        for met in itertools.combinations(CONDITIONS, number):
            assert of(*met, asleep=True).health is Health.SLEEPING


def test_the_http_status_of_each_health() -> None:
    assert {health.value: health.http for health in Health} == {
        "active": 200,
        "sleeping": 200,
        "degraded": 200,
        "waiting": 202,
        "starting": 202,
        "failed": 503,
    }


@pytest.mark.parametrize(
    ("total", "admin", "snapshot"), [(20, 4, 16), (1, 1, 1), (2, 1, 1), (100, 4, 96), (8, 2, 6)]
)
def test_the_sizes_of_the_pools(total: int, admin: int, snapshot: int) -> None:
    assert pool_sizes(total) == (admin, snapshot)
