"""The core: which caller gets which connection, and which connections are closed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.reservoir.stand_in import Conn, caller, filled, open_one

from moored.reservoir import ReservoirConfig
from moored.reservoir._core import Core
from moored.reservoir._item import FRESH, Item, Place

pytestmark = pytest.mark.pure

# Born at 0 with 660 s to live: the guard window of 45 s begins at 615.
USABLE, OVER = 615.0, 660.0
# Somebody is served each six seconds, after six seconds: longer than the target of five.
SLOW = (6.0, 12.0, 18.0, 24.0, 30.0)


def reasons(core: Core[Conn]) -> dict[str, int]:
    return dict(core.discards)


# -- checkout and return -------------------------------------------------------------------------


def test_a_returned_connection_is_ready_again() -> None:
    core, (item,) = filled(1)
    assert core.search(1.0) is item
    assert (item.place, core.out, len(core.ready)) == (Place.OUT, 1, 0)
    assert core.search(1.0) is None
    assert core.give(item, 3.0) is None
    assert (item.place, core.out, len(core.ready)) == (Place.READY, 0, 1)
    assert (core.checkouts, core.usage, core.retired) == (1, 2.0, [])


def test_connections_are_handed_out_in_the_order_in_which_they_came_back() -> None:
    core, items = filled(3)
    assert [core.search(1.0) for _ in items] == items
    for item in reversed(items):
        core.give(item, 2.0)
    assert [core.search(3.0) for _ in items] == items[::-1]


def test_take_returns_only_fresh_connections() -> None:
    core, (item,) = filled(1)
    assert core.take(FRESH) is None, "it is no longer fresh"
    assert core.search(FRESH) is item
    core.give(item, 10.0)
    assert core.take(10.0 + 0.9 * FRESH) is item
    assert (core.checkouts, item.since) == (2, 10.0 + 0.9 * FRESH)


def test_take_returns_none_if_no_connection_is_ready() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1))
    assert core.take(0.0) is None
    assert core.search(0.0) is None


def test_take_never_hands_out_within_the_guard_window() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    core.give(item, USABLE - FRESH / 2)
    assert core.take(USABLE - FRESH / 4) is item
    core.give(item, USABLE - FRESH / 4)
    assert core.take(USABLE) is None
    assert core.search(USABLE) is None


def test_no_caller_overtakes_the_waiters() -> None:
    core, (item,) = filled(1)
    caller(core, 0.0)
    assert core.take(0.0) is None
    assert core.search(0.0) is None
    assert item.place is Place.READY


def test_a_connection_that_is_returned_twice_is_ready_once() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    core.give(item, 1.0)
    core.give(item, 1.0)
    assert len(core.ready) == 1
    assert core.search(1.0) is item
    assert core.search(1.0) is None


def test_a_discarded_connection_cannot_be_returned() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    core.discard(item, "bad")
    assert core.give(item, 1.0) is None
    core.discard(item, "bad")
    assert (list(core.ready), core.retired, reasons(core)) == ([], [item], {"bad": 1})


def test_pick_takes_a_given_connection_only_while_it_is_ready() -> None:
    core, (first, second) = filled(2)
    assert core.pick(second, 1.0)
    assert not core.pick(second, 1.0)
    assert list(core.ready) == [first]
    assert core.checkouts == 0, "to look at one is no checkout"
    core.put(second, 1.0)
    assert list(core.ready) == [first, second]


# -- the guard window ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "reason"),
    [(USABLE, "guard_on_checkout"), (OVER, "expired_on_checkout")],
)
def test_the_guard_window_at_checkout(now: float, reason: str) -> None:
    core, (item,) = filled(1)
    assert core.search(now) is None
    assert (core.retired, reasons(core), core.closing) == ([item], {reason: 1}, 1)


def test_just_before_the_guard_window_it_is_handed_out() -> None:
    core, (item,) = filled(1)
    assert core.search(math.nextafter(USABLE, 0.0)) is item


@pytest.mark.parametrize(
    ("now", "reason"),
    [(USABLE, "guard_on_return"), (OVER, "expired_on_return")],
)
def test_the_guard_window_at_return(now: float, reason: str) -> None:
    core, (item,) = filled(1)
    core.search(1.0)
    assert core.give(item, now) is None
    assert (core.retired, reasons(core)) == ([item], {reason: 1})


@pytest.mark.parametrize(
    ("now", "reason"),
    [(USABLE, "guard_on_scan"), (OVER, "expired_on_scan")],
)
def test_the_guard_window_in_the_scan(now: float, reason: str) -> None:
    core, items = filled(3)
    core.scan(math.nextafter(USABLE, 0.0), replacing=False)
    assert core.retired == []
    core.scan(now, replacing=False)
    assert (core.retired, reasons(core)) == (items, {reason: 3})


def test_the_scan_leaves_what_is_in_use_to_its_return() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    core.scan(OVER, replacing=False)
    assert item.place is Place.OUT
    core.give(item, OVER)
    assert reasons(core) == {"expired_on_return": 1}


def test_a_connection_in_its_guard_window_is_not_handed_to_a_waiter() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    waiter = caller(core, 1.0)
    assert core.give(item, USABLE) is None
    assert not waiter.settled
    assert list(core.waiting) == [waiter]


def test_search_skips_all_stale_connections() -> None:
    core, old = filled(3, max_size=4)
    assert core.plan() == 1
    young, _ = open_one(core, 400.0)
    assert core.search(USABLE) is young
    assert (core.retired, reasons(core)) == (old, {"guard_on_checkout": 3})


# -- a full reservoir ----------------------------------------------------------------------------


def test_a_connection_returned_to_a_full_reservoir_is_closed() -> None:
    core, items = filled(3)
    for _ in items:
        core.search(1.0)
    core.resize(2, 2)
    for item in items:
        core.give(item, 2.0)
    assert reasons(core) == {"reservoir_full": 1}
    assert list(core.ready) == items[1:]


def test_without_keep_a_returned_connection_serves_a_waiter_or_is_closed() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1, keep=False))
    first, second = caller(core, 0.0), caller(core, 0.0)
    assert core.plan() == 1
    item, served = open_one(core)
    assert served is first
    assert core.give(item, 1.0) is second
    assert core.give(item, 2.0) is None
    assert (item.place, core.retired, reasons(core)) == (Place.GONE, [item], {"not_kept": 1})


def test_without_keep_nothing_is_kept_after_a_resize() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1, keep=False))
    caller(core, 0.0)
    core.plan()
    item, _ = open_one(core)
    core.resize(0, 2)
    assert core.give(item, 1.0) is None
    assert reasons(core) == {"not_kept": 1}


def test_without_keep_a_new_connection_without_a_waiter_is_closed() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1, keep=False))
    waiter = caller(core, 0.0)
    core.plan()
    core.leave(waiter, 0.5)
    item, _ = open_one(core, 1.0)
    assert (core.retired, reasons(core)) == ([item], {"not_kept": 1})


def test_a_connection_that_arrives_in_a_full_reservoir_is_closed() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=2))
    assert core.plan() == 2
    core.resize(1, 1)
    first, second = (open_one(core)[0] for _ in range(2))
    assert (list(core.ready), core.retired) == ([first], [second])
    assert reasons(core) == {"reservoir_full": 1}


# -- waiting -------------------------------------------------------------------------------------


def test_waiters_are_served_in_the_order_of_arrival() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    callers = [caller(core, time) for time in (1.0, 2.0, 3.0)]
    for place, expected in enumerate(callers):
        assert core.give(item, 10.0) is expected
        assert expected.item is item
        assert (item.place, len(core.waiting)) == (Place.OUT, 2 - place)
    assert core.give(item, 10.0) is None
    assert (core.queued, core.handed, core.waited) == (3, 3, 9.0 + 8.0 + 7.0)


def test_a_new_connection_goes_to_the_first_waiter() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=2))
    first, second = caller(core, 0.0), caller(core, 0.0)
    assert core.plan() == 2
    item, served = open_one(core, 1.0)
    assert (served, first.item, second.item) == (first, item, None)


def test_a_caller_leaves_without_a_connection() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    first, second = caller(core, 1.0), caller(core, 2.0)
    assert core.leave(first, 5.0) is None
    assert core.waited == 4.0
    assert core.give(item, 6.0) is second


def test_a_caller_leaves_with_a_connection_that_goes_to_the_next() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    first, second = caller(core, 1.0), caller(core, 2.0)
    assert core.give(item, 3.0) is first
    assert core.leave(first, 4.0) is item
    assert core.give(item, 4.0) is second
    assert list(core.waiting) == []


def test_a_caller_that_leaves_after_the_close_is_no_error() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    waiter = caller(core, 1.0)
    assert core.close() == [waiter]
    assert core.leave(waiter, 2.0) is None, "its timeout had expired before"
    assert item.place is Place.OUT


def test_expired_waiters_leave_the_queue() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    hasty, patient = caller(core, 1.0, patience=2.0), caller(core, 1.0, patience=30.0)
    assert core.expire(math.nextafter(3.0, 0.0)) == []
    assert core.expire(3.0) == [hasty]
    assert (core.timeouts, list(core.waiting)) == (1, [patient])
    assert core.give(item, 4.0) is patient


def test_a_queue_may_be_limited() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1), max_waiting=2)
    for _ in range(2):
        assert core.refuses(0.0) is None
        caller(core, 0.0)
    assert core.refuses(0.0) == "2 callers wait already (max_waiting=2)"
    assert core.refused == 1


def test_an_overloaded_queue_refuses_callers_until_it_clears() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    for now in SLOW:
        caller(core, now - 6.0)
        core.give(item, now)
    caller(core, 30.0)
    why = core.refuses(30.0)
    assert why is not None
    assert "longer than queue_target; 1 callers wait" in why
    core.give(item, 32.0)
    caller(core, 32.0)
    assert core.refuses(32.0) is None, "that one waited for two seconds only"


def test_an_overload_without_waiters_refuses_no_caller() -> None:
    core, (item,) = filled(1)
    core.search(0.0)
    for now in SLOW:
        caller(core, now - 6.0)
        core.give(item, now)
    assert core.overload.overloaded
    assert core.refuses(30.0) is None, "who is first in the queue may be served at once"


def test_a_checkout_that_did_not_wait_clears_the_overload() -> None:
    core, (item, _other) = filled(2)
    core.search(0.0), core.search(0.0)
    for now in SLOW:
        caller(core, now - 6.0)
        core.give(item, now)
    assert core.overload.overloaded
    core.give(item, 30.0)
    assert core.search(30.0) is item
    caller(core, 30.0)
    assert core.refuses(30.0) is None


# -- letting go ----------------------------------------------------------------------------------


def test_retire_closes_at_once_or_at_the_return() -> None:
    core, (ready, out) = filled(2)
    core.ready.rotate()
    assert core.search(0.0) is out
    core.retire(ready, "lease_lost")
    assert core.retired == [ready]
    core.retire(out, "lease_lost")
    core.retire(out, "drained")
    assert out.place is Place.OUT
    core.give(out, 1.0)
    assert (core.retired, reasons(core)) == ([ready, out], {"lease_lost": 2})


def test_after_a_drain_only_new_connections_are_handed_out() -> None:
    core, items = filled(3)
    used = core.search(0.0)
    assert used is items[0]
    core.drain()
    assert core.retired == items[1:]
    assert core.plan() == 0, "there is no room while they are being closed"
    core.closed()
    core.closed()
    assert core.plan() == 2
    fresh, _ = open_one(core, 1.0)
    core.give(used, 1.0)
    assert reasons(core) == {"drained": 3}
    assert core.search(2.0) is fresh


def test_close_retires_all_connections_and_returns_the_waiters() -> None:
    core, items = filled(3)
    used = core.search(0.0)
    assert used is not None
    waiter = caller(core, 0.0)
    assert core.close() == [waiter]
    assert (list(core.waiting), core.retired) == ([], items[1:])
    assert core.plan() == 0
    core.give(used, 1.0)
    assert reasons(core) == {"closed": 3}
    assert core.items == {}
    for _ in items:
        core.closed()
    assert (core.size, core.plan()) == (0, 0), "there is room, and nothing is opened"


def test_a_connection_that_arrives_after_the_close_is_closed() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=1))
    core.plan()
    core.close()
    item, waiter = open_one(core, 1.0)
    assert (waiter, core.retired, reasons(core)) == (None, [item], {"closed": 1})


# -- resize --------------------------------------------------------------------------------------


def test_a_resize_to_fewer_closes_ready_connections_first() -> None:
    core, items = filled(5)
    used = core.search(0.0)
    assert used is items[0]
    core.resize(2, 2)
    assert (core.retired, list(core.ready)) == (items[1:4], items[4:])
    assert reasons(core) == {"reservoir_full": 3}
    core.give(used, 1.0)
    assert len(core.ready) == 2


def test_a_resize_to_more_opens_connections() -> None:
    core, _ = filled(2)
    assert core.plan() == 0
    core.resize(4, 4)
    assert core.plan() == 2


def test_a_low_watermark_that_was_given_is_kept() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=10, low_watermark=2))
    for target, watermark in ((20, 2), (20, 2), (1, 1), (10, 2)):
        core.resize(target, 20)
        assert (core.target, core.watermark) == (target, watermark)


def test_a_watermark_that_was_not_given_is_the_target() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=10))
    for target in (20, 4, 8):
        core.resize(target, 20)
        assert core.watermark == target


def test_a_disabled_reservoir_opens_nothing_after_a_resize() -> None:
    core: Core[Conn] = Core(ReservoirConfig(max_size=4, enabled=False))
    core.resize(4, 8)
    assert core.plan() == 0
    assert core.max_size == 8


# -- shrinking -----------------------------------------------------------------------------------


def grown(target: int, more: int, **settings: Any) -> Core[Conn]:
    """A core that has more than its target, because callers had to wait."""
    core, items = filled(
        target, target_ready=target, low_watermark=0, max_size=target + more, **settings
    )
    for _ in items:
        core.search(0.0)
    waiting = [caller(core, 0.0) for _ in range(more)]
    for _ in waiting:
        core.plan()
        items.append(open_one(core, 0.0)[0])
    for item in items:
        core.give(item, 0.0)
    return core


def test_unneeded_connections_above_the_target_are_closed() -> None:
    core = grown(2, 3, max_idle=100.0)
    core.scan(0.0, replacing=False)
    core.scan(99.0, replacing=False)
    assert reasons(core) == {}
    core.scan(100.0, replacing=False)
    assert reasons(core) == {"idle": 3}
    core.scan(300.0, replacing=False)
    assert len(core.ready) == 2, "the target stays"


def test_needed_connections_above_the_target_are_kept() -> None:
    core = grown(2, 3, max_idle=100.0)
    core.scan(0.0, replacing=False)
    used = [core.search(50.0) for _ in range(4)]
    core.scan(50.0, replacing=False)
    for item in used:
        assert item is not None
        core.give(item, 51.0)
    core.scan(100.0, replacing=False)
    assert reasons(core) == {"idle": 1}, "never were fewer than one ready"


# -- numbers -------------------------------------------------------------------------------------


def test_size_counts_all_that_may_exist() -> None:
    core, items = filled(3, max_size=5, low_watermark=2)
    core.search(0.0)
    assert core.plan() == 1
    core.discard(items[1], "bad")
    assert (len(core.items), core.opening, core.closing, core.size) == (2, 1, 1, 4)
    assert core.can_grow
    core.failed()
    core.closed()
    assert core.size == 2


def test_in_use_is_sorted_by_time_held() -> None:
    core, (first, second, third) = filled(3)
    for now in (1.0, 2.0, 3.0):
        core.search(now)
    core.give(first, 4.0)
    core.search(5.0)
    assert list(core.in_use()) == [second, third, first]
    core.give(third, 6.0)
    assert list(core.in_use()) == [second, first]


def test_repr_of_an_item() -> None:
    item: Item[Conn] = Item(Conn(), born=0.0, lifetime=660.0, guard=45.0)
    assert (item.expires, item.usable_until) == (OVER, USABLE)
    assert repr(item) == "<Item gone, 11 m 0 s to live>"
