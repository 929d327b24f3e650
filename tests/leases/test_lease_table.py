"""The lease table and the time heap: no clock, no I/O."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.leases.conformance import request

from moored.leases import Grant, Request
from moored.leases._lease_table import Entry, LeaseTable
from moored.leases._policy import Policy
from moored.leases._time_heap import TimeHeap

pytestmark = pytest.mark.pure


def table(**options: float) -> LeaseTable:
    return LeaseTable(Policy(**options), chance=random.Random(7))  # type: ignore[arg-type]


def held(table: LeaseTable, sent_at: float = 0.0, *, key: str = "db", ttl: float = 180.0) -> Entry:
    wanted = request(key, limit=1000, ttl=ttl)
    return table.granted(wanted, Grant(wanted.id, 1), sent_at)


def ids(batches: list[list[Request]]) -> list[str]:
    return [each.id for batch in batches for each in batch]


# -- deadlines -----------------------------------------------------------------------------------


def test_the_deadline_counts_from_the_request() -> None:
    entry = held(table(), 100.0)
    assert entry.deadline == 100.0 + 180.0 - 5.0


def test_the_margin_is_a_tenth_of_a_short_life() -> None:
    assert held(table(), ttl=20.0).deadline == 18.0
    assert held(table(margin=1.0), ttl=20.0).deadline == 19.0


def test_a_renewal_moves_the_deadline_from_its_own_request() -> None:
    leases = table()
    entry = held(leases, 0.0)
    leases.renewed([entry.id], 60.0)
    assert entry.deadline == 235.0


def test_an_earlier_request_that_is_answered_later_changes_nothing() -> None:
    leases = table()
    entry = held(leases, 0.0)
    leases.renewed([entry.id], 60.0)
    leases.renewed([entry.id], 30.0)
    assert entry.deadline == 235.0


def test_an_expired_lease_is_reported_once() -> None:
    leases = table()
    first, second = held(leases, 0.0), held(leases, 10.0)
    assert leases.next_deadline() == 175.0
    assert leases.expired(174.9) == []
    assert leases.expired(175.0) == [first]
    assert leases.expired(175.0) == []
    assert leases.next_deadline() == 185.0
    assert leases.expired(1000.0) == [second]
    assert leases.next_deadline() == math.inf


# -- renewals ------------------------------------------------------------------------------------


def test_the_first_renewal_is_in_the_last_half_of_the_interval() -> None:
    leases = table()
    dues = []
    for _ in range(100):
        held(leases, 0.0)
        dues.append(leases.next_due())
    assert 30.0 <= min(dues) < 33.0
    assert dues[0] <= 60.0


def test_later_renewals_come_at_the_interval() -> None:
    leases = table()
    entry = held(leases, 0.0)
    leases.due(60.0)
    leases.renewed([entry.id], 60.0)
    assert leases.next_due() == 120.0


def test_a_short_life_is_renewed_three_times() -> None:
    leases = table()
    entry = held(leases, 0.0, ttl=9.0)
    assert entry.every == 3.0
    assert held(leases, ttl=180.0).every == 60.0
    assert held(table(renew_every=10.0)).every == 10.0


def test_leases_that_are_due_soon_are_renewed_together() -> None:
    leases = table()
    entries = [held(leases, 0.0) for _ in range(50)]
    for sent_at, entry in enumerate(entries):
        leases.renewed([entry.id], float(sent_at))
    assert leases.due(59.9) == []
    assert ids(leases.due(60.0)) == [entry.id for entry in entries[:4]]
    assert leases.next_due() == 64.0


def test_what_is_being_renewed_is_not_due_again() -> None:
    leases = table()
    entry = held(leases, 0.0)
    assert ids(leases.due(60.0)) == [entry.id]
    assert leases.due(70.0) == []
    assert leases.next_due() == math.inf
    leases.not_renewed([entry.id], 71.0)
    assert ids(leases.due(71.0)) == [entry.id]


def test_batches_have_a_size() -> None:
    leases = table(batch=10)
    for _ in range(25):
        held(leases, 0.0)
    assert [len(batch) for batch in leases.due(60.0)] == [10, 10, 5]


# -- ends ----------------------------------------------------------------------------------------


def test_a_lease_ends_once() -> None:
    leases = table()
    entry = held(leases)
    assert leases.gone([entry.id]) == [entry]
    assert leases.gone([entry.id]) == []
    assert leases.released(entry.id) is None
    assert leases.expired(math.inf) == []
    leases.renewed([entry.id], 60.0)
    assert len(leases) == 0
    assert leases.next_due() == leases.next_deadline() == math.inf


def test_held_leases_use_up_the_local_limit_of_their_key_alone() -> None:
    leases = table(local_limit=2)
    first = held(leases, key="db/orders")
    second = held(leases, key="db/orders")
    other = held(leases, key="db/users")
    assert not leases.has_local_room(second.request)
    assert leases.has_local_room(other.request)
    leases.released(first.id)
    assert leases.has_local_room(second.request)


def test_a_lease_in_doubt_is_kept_until_settled_or_expired() -> None:
    leases = table(batch=2)
    doubts = [request(ttl=10.0) for _ in range(3)]
    for doubt in doubts:
        leases.doubted(doubt, 100.0)
    assert [len(batch) for batch in leases.to_release(100.0)] == [2, 1]
    leases.undone(doubts[0].id, True, 100.0)
    assert ids(leases.to_release(100.0)) == [doubts[1].id, doubts[2].id]
    assert leases.left_to_time(119.9) == 0
    assert leases.left_to_time(120.0) == 2
    assert leases.doubts == 0
    assert leases.next_undo() == math.inf


def test_the_release_of_an_unanswered_acquire_is_repeated() -> None:
    """The request may have waited on the way until the outage was over, and come after that."""
    leases = table()
    asked = request(ttl=180.0)
    leases.doubted(asked, 0.0, unanswered=True)
    now, tries = 0.0, []
    while leases.doubts:
        now = leases.next_undo()
        tries.append(now)
        assert ids(leases.to_release(now)) == [asked.id]
        assert ids(leases.to_release(now - 0.1)) == []
        leases.undone(asked.id, False, now)
    assert tries == [0.0, 0.5, 2.5, 7.5]
    leases.undone(asked.id, True, now)


def test_the_release_of_a_held_lease_is_not_repeated() -> None:
    leases = table()
    ended = request()
    leases.doubted(ended, 0.0)
    leases.undone(ended.id, False, 0.0)
    assert leases.doubts == 0


def test_closing_ends_everything() -> None:
    leases = table()
    entries = [held(leases), leases.granted_locally(request(limit=5))]
    assert leases.close() == entries
    assert len(leases) == 0
    assert leases.local() == []


# -- local leases --------------------------------------------------------------------------------


def test_a_local_lease_has_no_deadline_and_the_oldest_fence() -> None:
    leases = table()
    entry = leases.granted_locally(request(limit=5))
    assert (entry.local, entry.fence, entry.deadline) == (True, 0, math.inf)
    assert leases.next_due() == leases.next_deadline() == math.inf
    assert leases.local() == [entry]


def test_a_local_lease_becomes_a_real_one() -> None:
    leases = table()
    entry = leases.granted_locally(request(limit=5, ttl=180.0))
    assert leases.exchanged(entry, Grant(entry.id, 12), 50.0)
    assert (entry.local, entry.fence, entry.deadline) == (False, 12, 225.0)
    assert leases.local() == []
    assert 80.0 <= leases.next_due() <= 110.0


def test_a_local_lease_that_has_ended_is_not_exchanged() -> None:
    leases = table()
    entry = leases.granted_locally(request(limit=5))
    leases.released(entry.id)
    assert not leases.exchanged(entry, Grant(entry.id, 12), 50.0)
    assert leases.next_deadline() == math.inf


def test_a_local_lease_gets_another_id() -> None:
    leases = table()
    entry = leases.granted_locally(request(limit=5))
    old = entry.id
    leases.renamed(entry, "another")
    assert entry.id == "another"
    assert leases.released(old) is None
    assert leases.released("another") is entry
    leases.renamed(entry, "a third")
    assert leases.released("a third") is None


# -- the heap ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 20))), max_size=60
    ),
    st.integers(0, 20),
)
def test_the_time_heap_behaves_like_a_sorted_dictionary(
    steps: list[tuple[str, int | None]], until: int
) -> None:
    heap, model = TimeHeap[str](), dict[str, float]()
    for name, when in steps:
        if when is None:
            heap.drop(name)
            model.pop(name, None)
        else:
            heap.set(name, float(when))
            model[name] = float(when)
        assert heap.first() == min(model.values(), default=math.inf)
    due = sorted((when, name) for name, when in model.items() if when <= until)
    assert heap.pop(float(until)) == [name for _, name in due]
    assert len(heap) == len(model) - len(due)


def test_the_time_heap_does_not_grow_with_changes() -> None:
    heap = TimeHeap[str]()
    for when in range(10_000):
        heap.set("a", float(when))
    assert len(heap._heap) < 200
    assert heap.first() == 9999.0
