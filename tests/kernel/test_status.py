"""Conditions are cleared when their owner ends, and a waiter never misses a status."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Condition, Recorder, StatusChange, StatusMonitor, WaitTimeout
from moored.kernel._ownership import _owned

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]


class Level(Enum):
    STARTING = "starting"
    ACTIVE = "active"


def level(conditions: Mapping[str, Condition]) -> Level:
    return Level.ACTIVE if all(each.met for each in conditions.values()) else Level.STARTING


def is_active(status: Level) -> bool:
    return status is Level.ACTIVE


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def monitor(clock: FakeClock) -> StatusMonitor[Level]:
    return StatusMonitor(["connected", "migrated"], level, name="postgres", clock=clock)


class Holder:
    """A task that sets a condition and holds it until the test ends it."""

    def __init__(self, monitor: StatusMonitor[Any], condition: str, name: str = "holder") -> None:
        self.error: BaseException | None = None
        self._end = asyncio.Event()
        self._set = asyncio.Event()
        self.task = asyncio.create_task(self._run(monitor, condition), name=name)

    async def begin(self) -> Holder:
        await self._set.wait()
        return self

    async def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._end.set()
        await asyncio.wait((self.task,))
        await asyncio.sleep(0)
        if not self.task.cancelled():
            assert self.task.exception() is error

    async def _run(self, monitor: StatusMonitor[Any], condition: str) -> None:
        monitor.set(condition)
        self._set.set()
        await self._end.wait()
        if self.error is not None:
            raise self.error


def test_no_condition_is_met_at_first(monitor: StatusMonitor[Level]) -> None:
    assert monitor.status() is Level.STARTING
    assert monitor.conditions() == {
        "connected": Condition("connected", False, 0.0, None),
        "migrated": Condition("migrated", False, 0.0, None),
    }
    assert repr(monitor) == ("<StatusMonitor postgres: starting, 0 of 2 conditions met, 0 waiting>")


def test_plain_code_sets_and_clears_without_an_owner(
    monitor: StatusMonitor[Level], clock: FakeClock
) -> None:
    clock.advance(1)
    monitor.set("connected", owner="nobody", detail="to 127.0.0.1")
    clock.advance(1)
    monitor.set("migrated", owner="nobody")
    assert monitor.status() is Level.ACTIVE
    assert monitor.conditions()["connected"] == ("connected", True, 1.0, "to 127.0.0.1")
    clock.advance(1)
    monitor.clear("connected", ConnectionResetError("peer reset"))
    assert monitor.status() is Level.STARTING
    assert monitor.conditions()["connected"] == (
        "connected",
        False,
        3.0,
        "peer reset (ConnectionResetError)",
    )


def test_a_condition_keeps_its_time_while_only_its_detail_changes(
    monitor: StatusMonitor[Level], clock: FakeClock
) -> None:
    monitor.set("connected", owner="nobody", detail="a")
    clock.advance(5)
    monitor.set("connected", owner="nobody", detail="b")
    assert monitor.conditions()["connected"] == ("connected", True, 0.0, "b")


def test_without_a_task_an_owner_must_be_named(monitor: StatusMonitor[Level]) -> None:
    with pytest.raises(RuntimeError):
        monitor.set("connected")
    assert not monitor.conditions()["connected"].met


def test_an_unknown_condition_is_named_with_the_known_ones(monitor: StatusMonitor[Level]) -> None:
    with pytest.raises(ValueError, match=r"postgres has no condition 'conected'; it has connected"):
        monitor.set("conected", owner="nobody")
    with pytest.raises(ValueError, match="no condition 'gone'"):
        monitor.clear("gone", "test")


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ("abc", r"write \['abc'\]"),
        ([], "at least one"),
        (["a", "b", "a", "b"], "'a' is declared more than once; condition 'b' is"),
    ],
)
def test_mistakes_in_the_declaration(conditions: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StatusMonitor(conditions, level)


async def test_the_end_of_the_owner_clears_its_condition(monitor: StatusMonitor[Level]) -> None:
    holder = await Holder(monitor, "connected", "link").begin()
    assert monitor.conditions()["connected"].met
    await holder.end()
    assert monitor.conditions()["connected"].detail == "its owner link ended: it returned"


async def test_the_reason_of_a_cleared_condition_is_how_its_owner_ended(
    monitor: StatusMonitor[Level],
) -> None:
    failed = await Holder(monitor, "connected", "link").begin()
    stopped = await Holder(monitor, "migrated", "setup").begin()
    await failed.end(ConnectionResetError("peer reset"))
    stopped.task.cancel()
    await stopped.end()
    assert [each.detail for each in monitor.conditions().values()] == [
        "its owner link ended: peer reset (ConnectionResetError)",
        "its owner setup ended: it was stopped",
    ]


async def test_the_end_of_a_former_owner_changes_nothing(monitor: StatusMonitor[Level]) -> None:
    old = await Holder(monitor, "connected", "old").begin()
    new = await Holder(monitor, "connected", "new").begin()
    await old.end()
    assert monitor.conditions()["connected"].met
    await new.end()
    assert monitor.conditions()["connected"].detail == "its owner new ended: it returned"


async def test_an_owner_may_be_given_and_may_clear_its_condition(
    monitor: StatusMonitor[Level],
) -> None:
    other = asyncio.create_task(asyncio.sleep(0))
    monitor.set("connected", owner=other)
    monitor.set("migrated", owner=other)
    monitor.set("migrated", owner="nobody")
    await other
    await asyncio.sleep(0)
    assert [each.met for each in monitor.conditions().values()] == [False, True]
    with pytest.raises(RuntimeError, match="has ended"):
        monitor.set("connected", owner=other)
    assert not monitor.conditions()["connected"].met


async def test_a_cleared_condition_is_not_cleared_again_by_its_owners_end(
    monitor: StatusMonitor[Level],
) -> None:
    holder = await Holder(monitor, "connected").begin()
    monitor.clear("connected", "on purpose")
    await holder.end()
    assert monitor.conditions()["connected"].detail == "on purpose"


async def test_a_former_owner_keeps_no_clean_ups(
    monitor: StatusMonitor[Level],
) -> None:
    owner = asyncio.current_task()
    assert owner is not None
    monitor.set("migrated")
    before = len(_owned[owner]._clean_ups)
    for _ in range(100):
        monitor.set("connected")
        monitor.clear("connected", "test")
        monitor.set("connected")
        monitor.set("connected", owner="nobody")
    assert len(_owned[owner]._clean_ups) == before


async def test_waiting_for_the_current_status_returns_at_once(
    monitor: StatusMonitor[Level],
) -> None:
    assert await monitor.wait_until(lambda status: status is Level.STARTING) is Level.STARTING


async def test_all_waiters_wake_at_the_change(monitor: StatusMonitor[Level]) -> None:
    waiters = [asyncio.create_task(monitor.wait_until(is_active)) for _ in range(5)]
    await asyncio.sleep(0)
    assert "5 waiting" in repr(monitor)
    monitor.set("connected", owner="nobody")
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    monitor.set("migrated", owner="nobody")
    assert await asyncio.gather(*waiters) == [Level.ACTIVE] * 5
    assert "0 waiting" in repr(monitor)


async def test_a_status_that_is_undone_before_the_waiter_runs_is_not_missed(
    monitor: StatusMonitor[Level],
) -> None:
    waiter = asyncio.create_task(monitor.wait_until(is_active))
    await asyncio.sleep(0)
    monitor.set("connected", owner="nobody")
    monitor.set("migrated", owner="nobody")
    monitor.clear("connected", "at once")
    assert monitor.status() is Level.STARTING
    assert await waiter is Level.ACTIVE


async def test_a_timeout_names_what_is_missing_since_when_and_why(
    monitor: StatusMonitor[Level], clock: FakeClock
) -> None:
    monitor.set("connected", owner="nobody")
    clock.advance(2)
    monitor.clear("connected", ConnectionResetError("peer reset"))
    clock.advance(14)
    with pytest.raises(WaitTimeout) as caught:
        await monitor.wait_until(is_active, timeout=0)
    assert str(caught.value) == (
        "postgres is 'starting' after waiting 0 s; missing: "
        "connected (for 14 s: peer reset (ConnectionResetError)), migrated (for 16 s: never set)"
    )
    assert isinstance(caught.value, TimeoutError)
    assert "0 waiting" in repr(monitor)


async def test_a_timeout_with_nothing_missing(monitor: StatusMonitor[Level]) -> None:
    monitor.set("connected", owner="nobody")
    monitor.set("migrated", owner="nobody")
    with pytest.raises(WaitTimeout, match="all its conditions are met"):
        await monitor.wait_until(lambda status: False, timeout=0)


async def test_a_cancelled_waiter_is_removed(monitor: StatusMonitor[Level]) -> None:
    gone, stays = [asyncio.create_task(monitor.wait_until(is_active, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    monitor.set("connected", owner="nobody")
    monitor.set("migrated", owner="nobody")
    assert await stays is Level.ACTIVE


async def test_a_waiter_cancelled_as_it_times_out_logs_nothing(
    monitor: StatusMonitor[Level],
) -> None:
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    waiter = asyncio.create_task(monitor.wait_until(is_active, timeout=0))
    await asyncio.sleep(0)
    # The timer sets the error; this runs after it in the same turn, before the waiter does.
    loop.call_later(0, waiter.cancel)
    with pytest.raises((asyncio.CancelledError, WaitTimeout)):
        await waiter
    del waiter
    gc.collect()
    assert complaints == []


async def test_a_predicate_that_raises_fails_its_own_waiter_only(
    monitor: StatusMonitor[Level],
) -> None:
    def broken(status: Level) -> bool:
        if monitor.conditions()["connected"].met:
            raise ZeroDivisionError
        return False

    bad = asyncio.create_task(monitor.wait_until(broken))
    good = asyncio.create_task(monitor.wait_until(is_active))
    await asyncio.sleep(0)
    monitor.set("connected", owner="nobody")
    monitor.set("migrated", owner="nobody")
    with pytest.raises(ZeroDivisionError):
        await bad
    assert await good is Level.ACTIVE


class Fragile:
    """A status function that raises on command."""

    broken = False

    def __call__(self, conditions: Mapping[str, Condition]) -> bool:
        if self.broken:
            raise ZeroDivisionError
        return conditions["a"].met


async def test_a_status_function_that_raises_fails_setters_and_waiters() -> None:
    status = Fragile()
    monitor = StatusMonitor(["a"], status)
    waiter = asyncio.create_task(monitor.wait_until(bool))
    await asyncio.sleep(0)
    status.broken = True
    with pytest.raises(ZeroDivisionError):
        monitor.set("a", owner="nobody")
    with pytest.raises(ZeroDivisionError):
        await waiter


async def test_a_status_function_that_raises_does_not_stop_an_owners_clean_ups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status = Fragile()
    monitor = StatusMonitor(["a"], status)
    holder = await Holder(monitor, "a").begin()
    status.broken = True
    with caplog.at_level(logging.ERROR, "moored.kernel"):
        await holder.end()
    assert not monitor.conditions()["a"].met
    assert "the status function of" in caplog.text


def test_subscribers_see_each_change(monitor: StatusMonitor[Level]) -> None:
    seen: list[StatusChange[Level]] = []
    stop = monitor.subscribe(seen.append)
    monitor.set("connected", owner="nobody")
    monitor.set("connected", owner="nobody")
    monitor.set("migrated", owner="nobody")
    stop()
    monitor.clear("migrated", "test")
    assert [(each.previous, each.status, each.condition.name) for each in seen] == [
        (Level.STARTING, Level.STARTING, "connected"),
        (Level.STARTING, Level.ACTIVE, "migrated"),
    ]


def test_as_dict_is_ready_for_json(monitor: StatusMonitor[Level], clock: FakeClock) -> None:
    monitor.set("connected", owner="nobody", detail="to 127.0.0.1")
    clock.advance(3)
    assert json.loads(json.dumps(monitor.as_dict())) == {
        "name": "postgres",
        "status": "starting",
        "conditions": {
            "connected": {"met": True, "for": 3.0, "detail": "to 127.0.0.1"},
            "migrated": {"met": False, "for": 3.0, "detail": None},
        },
    }


def test_changes_are_recorded_with_their_causes(clock: FakeClock) -> None:
    recorder = Recorder(clock=clock)
    monitor = StatusMonitor(["connected"], level, name="pg", clock=clock, recorder=recorder)
    monitor.set("connected", owner="nobody")
    monitor.clear("connected", ConnectionResetError("peer reset"))
    monitor.clear("connected", "refused")
    clock.advance(14)
    assert [event.text for event in recorder.events("pg")] == [
        "starting",
        "connected is met",
        "active",
        "connected is lost",
        "starting",
        "connected is still missing",
    ]
    lines = recorder.explain("pg").splitlines()
    assert lines[0] == "starting for 14 s"
    assert lines[1].startswith("  because  connected is lost at ")
    assert lines[2] == "  because  peer reset (ConnectionResetError)"
    assert lines[3] == "  then     connected is still missing, 14 s ago, because refused"
