"""The choice of slots, without a server."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.leases._dynamodb._plan import Slot, candidates, next_fence, read_order, usable_slots

pytestmark = pytest.mark.pure

NOW = 1_000


def occupied(*numbers: int, fence: int = 1) -> dict[int, Slot]:
    return {n: Slot(n, f"id-{n}", NOW + 1, fence) for n in numbers}


slots = st.sets(st.integers(0, 30))


@given(limit=st.integers(1, 20), live=slots)
def test_usable_slots_are_as_many_as_the_limit_allows(limit: int, live: set[int]) -> None:
    def total(allowed: int) -> int:
        return allowed + sum(number >= allowed for number in live)

    allowed = usable_slots(limit, live)
    assert 0 <= allowed <= limit
    assert allowed == 0 or total(allowed) <= limit
    assert allowed == limit or total(allowed + 1) > limit


def test_without_leases_above_the_limit_all_slots_may_be_used() -> None:
    assert usable_slots(10, range(10)) == 10
    assert usable_slots(10, []) == 10


@given(seed=st.integers(0, 10_000))
def test_a_lowered_limit_holds_for_clients_that_see_different_moments(seed: int) -> None:
    """Clients read at one time and write at another, while old leases drain away above them."""
    chance = random.Random(seed)
    limit = chance.randint(1, 8)
    live = set(chance.sample(range(limit, 20), chance.randint(0, limit)))
    live |= set(chance.sample(range(limit), chance.randint(0, limit - min(len(live), limit))))
    assert len(live) <= limit
    snapshots: list[tuple[int, list[int]]] = []
    for _ in range(60):
        match chance.randrange(3):
            case 0:
                view = occupied(*live)
                lease = f"lease-{chance.random()}"
                free = candidates(lease, limit, view, span=range(limit), now_ms=NOW)
                snapshots.append((usable_slots(limit, live), free))
            case 1 if snapshots:
                _, free = snapshots.pop(chance.randrange(len(snapshots)))
                still_free = [number for number in free if number not in live]
                live |= set(still_free[:1])
            case _ if live:
                live.remove(chance.choice(sorted(live)))
        assert len(live) <= limit


def test_missing_and_expired_slots_are_free() -> None:
    known = {**occupied(0, 2), 1: Slot(1, "old", NOW - 1, 5), 3: Slot(3, "given back", 0, 5)}
    free = candidates("x", 6, known, span=range(6), now_ms=NOW)
    assert sorted(free) == [1, 3, 4, 5]
    ends_now = {0: Slot(0, "ends now", NOW, 1)}
    assert candidates("x", 1, ends_now, span=range(1), now_ms=NOW) == []


def test_only_slots_that_were_read_are_candidates() -> None:
    assert sorted(candidates("x", 100, {}, span=range(40, 44), now_ms=NOW)) == [40, 41, 42, 43]
    assert sorted(candidates("x", 42, {}, span=range(40, 44), now_ms=NOW)) == [40, 41]


def test_the_order_of_slots_depends_on_the_lease_id() -> None:
    def first(lease: str) -> int:
        return candidates(lease, 100, {}, span=range(100), now_ms=NOW)[0]

    assert first("a") == first("a")
    assert len({first(f"lease-{n}") for n in range(100)}) > 50


@given(lease=st.text(min_size=1), limit=st.integers(1, 5_000))
def test_all_slots_are_read_once(lease: str, limit: int) -> None:
    read = [n for first, last in read_order(lease, limit) for n in range(first, last + 1)]
    assert sorted(read) == list(range(limit))


def test_a_fence_is_at_least_the_time() -> None:
    known = {0: Slot(0, "", 0, 10), 1: Slot(1, "", 0, NOW + 5), 2: Slot(2, "", 0, NOW + 9)}
    assert next_fence(5, 0, {}, NOW) == NOW
    assert next_fence(5, 0, known, NOW) == NOW
    assert next_fence(5, 1, known, NOW) == NOW + 6


def test_an_exclusive_fence_exceeds_those_of_all_slots() -> None:
    known = {0: Slot(0, "", 0, 10), 1: Slot(1, "", 0, NOW + 5), 2: Slot(2, "", 0, NOW + 9)}
    assert next_fence(1, 0, known, NOW) == NOW + 10
    assert next_fence(1, 0, {}, NOW) == NOW
