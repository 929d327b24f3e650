"""How many connections the core opens, and when it replaces one before it expires."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reservoir.stand_in import Conn, caller, filled, open_one

from moored.reservoir import ReservoirConfig
from moored.reservoir._core import Core
from moored.reservoir._item import Place

pytestmark = pytest.mark.pure


def core_of(max_size: int, **settings: int | bool | float) -> Core[Conn]:
    return Core(ReservoirConfig(max_size=max_size, **settings))  # type: ignore[arg-type]


# -- how many at once ----------------------------------------------------------------------------


def test_five_at_once_below_the_low_watermark() -> None:
    core = core_of(20)
    assert core.plan() == 5
    assert core.opening == 5


def test_at_most_eight_in_flight() -> None:
    core = core_of(20)
    assert [core.plan() for _ in range(3)] == [5, 3, 0]
    open_one(core)
    assert core.plan() == 1
    core.failed()
    assert core.plan() == 1
    assert core.opening == 8


def test_one_at_a_time_from_the_low_watermark_on() -> None:
    core, _ = filled(3, max_size=10, low_watermark=3)
    assert [core.plan() for _ in range(2)] == [1, 0]
    open_one(core)
    assert [core.plan() for _ in range(2)] == [1, 0]
    core.search(0.0)
    core.search(0.0)
    assert len(core.ready) == 2
    assert core.plan() == 5, "below it again"


def test_with_waiters_several_are_opened_at_once() -> None:
    core = core_of(20, enabled=False)
    for _ in range(7):
        caller(core, 0.0)
    assert [core.plan() for _ in range(3)] == [5, 2, 0], "though nothing is kept ready here"


def test_the_low_watermark_is_the_target_by_default() -> None:
    core, _ = filled(8, max_size=10)
    assert core.plan() == 2


def test_batch_and_max_in_flight_can_be_set() -> None:
    core = core_of(20, batch=2, max_in_flight=3)
    assert [core.plan() for _ in range(3)] == [2, 1, 0]


# -- how many in all -----------------------------------------------------------------------------


def test_connections_in_use_count_towards_the_target() -> None:
    core, items = filled(5)
    for _ in items:
        core.search(0.0)
    assert len(core.ready) == 0
    assert core.plan() == 0, "all of them exist, and will come back"


def test_closing_connections_count_towards_max_size() -> None:
    core, items = filled(5)
    for item in items[:2]:
        core.discard(item, "bad")
    assert core.plan() == 0
    core.closed()
    assert core.plan() == 1
    core.closed()
    assert core.plan() == 1
    assert core.size == 5


def test_above_the_target_connections_are_opened_only_for_waiters() -> None:
    core, items = filled(2, max_size=5, target_ready=2)
    assert core.plan() == 0
    for _ in items:
        core.search(0.0)
    assert core.plan() == 0, "all are in use, and no caller waits"
    caller(core, 0.0)
    caller(core, 0.0)
    assert [core.plan() for _ in range(2)] == [2, 0], "one for each who waits"
    caller(core, 0.0)
    caller(core, 0.0)
    assert core.plan() == 1, "five are the most"
    assert core.plan() == 0


def test_no_connection_is_opened_for_a_waiter_if_one_is_opening() -> None:
    core = core_of(8, target_ready=3)
    assert core.plan() == 3
    caller(core, 0.0)
    assert core.plan() == 0
    for _ in range(3):
        caller(core, 0.0)
    assert core.plan() == 1


def test_a_disabled_reservoir_opens_connections_only_for_waiters() -> None:
    core = core_of(4, enabled=False)
    assert core.plan() == 0
    caller(core, 0.0)
    assert [core.plan() for _ in range(2)] == [1, 0]
    item, served = open_one(core)
    assert served is not None
    assert core.plan() == 0
    core.give(item, 1.0)
    assert core.search(1.0) is item, "it is used again while it is good"


def test_after_the_close_nothing_is_opened() -> None:
    core = core_of(4)
    caller(core, 0.0)
    core.close()
    assert core.plan() == 0


# -- whatever happens ----------------------------------------------------------------------------

ACTIONS = ("plan", "arrive", "fail", "checkout", "return", "bad", "closed", "wait", "scan", "later")


@given(
    st.lists(st.sampled_from(ACTIONS), max_size=200),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_there_are_never_more_than_the_maximum(
    actions: list[str], max_size: int, target: int, low: int, chance: random.Random
) -> None:
    target = min(target, max_size)
    core = core_of(max_size, target_ready=target, low_watermark=min(low, target))
    now, out = 0.0, []
    for action in actions:
        if action == "plan":
            number = core.plan()
            assert 0 <= number <= 5
        elif action == "arrive" and core.opening:
            item, served = open_one(core, now, life=660.0 + chance.random() * 120.0)
            out += [item] if served is not None else []
        elif action == "fail" and core.opening:
            core.failed()
        elif action == "checkout" and (found := core.search(now)) is not None:
            assert now < found.usable_until
            assert found not in out, "two callers have it"
            out.append(found)
        elif action in ("return", "bad") and out:
            item = out.pop(chance.randrange(len(out)))
            if action == "bad":
                core.discard(item, "bad")
            elif core.give(item, now) is not None:
                out.append(item)
        elif action == "closed" and core.retired:
            assert core.retired.pop().place is Place.GONE
            core.closed()
        elif action == "wait" and not core.ready:
            caller(core, now)
        elif action == "scan":
            core.scan(now, replacing=True)
        elif action == "later":
            now += chance.random() * 200.0
        assert core.size <= max_size
        assert core.opening <= 8
        assert core.closing == len(core.retired)
        assert len(core.items) == len(core.ready) + len(out)
        assert core.births == len(core.items) + sum(core.discards.values())


# -- ahead of the end ----------------------------------------------------------------------------


def test_replacements_are_spread_over_time() -> None:
    core, items = filled(10)
    every = 615.0 / 10
    # Born together, all end together: the first must go nine steps before that.
    assert core.scan(0.0, replacing=True) == 615.0 - 9 * every
    assert core.scan(615.0 - 9 * every, replacing=True) == 615.0 - 9 * every
    assert dict(core.discards) == {"replaced_ahead": 1}
    assert core.retired == items[:1]
    core.closed()
    assert core.scan(100.0, replacing=True) == 615.0 - 8 * every


def test_a_connection_that_is_already_retired_is_not_replaced_again() -> None:
    core, (used, ready) = filled(2)
    assert core.search(0.0) is used
    core.retire(used, "drained")
    assert core.scan(1.0, replacing=True) > 1.0, "or else the scan would never rest"
    assert (ready.place, used.retire_reason) == (Place.READY, "drained")


def test_while_a_tenth_is_missing_nothing_is_replaced() -> None:
    core, _ = filled(10)
    core.scan(100.0, replacing=True)
    assert core.scan(300.0, replacing=True) == 300.0 + 61.5, "the one before is not back yet"
    assert dict(core.discards) == {"replaced_ahead": 1}
    core.closed()
    core.plan()
    open_one(core, 301.0)
    core.scan(302.0, replacing=True)
    assert dict(core.discards) == {"replaced_ahead": 2}


def test_a_connection_in_use_is_replaced_when_it_is_returned() -> None:
    core, items = filled(10)
    for _ in items:
        core.search(0.0)
    core.scan(62.0, replacing=True)
    doomed = [item for item in items if item.retire_reason]
    assert len(doomed) == 1
    assert core.retired == []
    core.give(doomed[0], 63.0)
    assert core.retired == doomed
    assert dict(core.discards) == {"replaced_ahead": 1}


def test_nothing_is_replaced_while_connecting_fails() -> None:
    core, _ = filled(10)
    assert core.scan(300.0, replacing=False) == math.inf
    assert dict(core.discards) == {}


def test_a_disabled_reservoir_replaces_nothing_in_advance() -> None:
    core = core_of(4, enabled=False)
    caller(core, 0.0)
    core.plan()
    item, _ = open_one(core)
    core.give(item, 1.0)
    assert core.scan(614.0, replacing=True) == math.inf
    assert dict(core.discards) == {}


def test_replacements_of_connections_opened_together_are_spread_over_their_lifetime() -> None:
    """The scan and the refiller at work: births drift apart, and never do many come at once."""
    chance = random.Random(1)
    core, _ = filled(20)
    for item in core.items.values():
        item.expires += chance.random() * 120.0
        item.usable_until = item.expires - 45.0
    births, now = [], 0.0
    while now < 3000.0:
        due = core.scan(now, replacing=True)
        for _ in core.retired:
            core.closed()
        core.retired.clear()
        for _ in range(core.plan()):
            births.append(now)
            open_one(core, now, life=660.0 + chance.random() * 120.0)
        now = max(now + 0.01, min(due, now + 1.0))
    gaps = [later - one for one, later in pairwise(births)]
    assert min(gaps) >= 0.9 * 615.0 / 20
    # Once they are spread, the first can stay until its guard window begins.
    assert set(core.discards) <= {"replaced_ahead", "guard_on_scan"}
    # Two lives, after which as many were born in each quarter as in any other.
    quarters = [sum(start <= birth < start + 150.0 for birth in births) for start in (2250, 2400)]
    assert all(abs(number - 150.0 / (615.0 / 20)) <= 2 for number in quarters)
