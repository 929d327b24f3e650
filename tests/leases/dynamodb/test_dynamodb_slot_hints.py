"""The slot hints of a client."""

from __future__ import annotations

import pytest
from tests.leases.conformance import request

from moored.kernel import Clock
from moored.leases._dynamodb._slot_hints import SlotHints

pytestmark = pytest.mark.pure


def test_a_slot_hint_is_kept_until_it_is_removed() -> None:
    hints = SlotHints(Clock.system())
    first, second = request("db"), request("db")
    assert hints.of(first) is None
    hints.note(first, 7)
    hints.note(second, 0)
    assert (hints.of(first), hints.of(second)) == (7, 0)
    hints.note(first, 8)
    assert hints.of(first) == 8
    hints.forget(first)
    hints.forget(first)
    assert hints.of(first) is None
    assert len(hints) == 1


def test_hints_of_expired_leases_are_removed() -> None:
    now = 0.0
    hints = SlotHints(Clock(lambda: now))
    held = [request(ttl=1e9) for _ in range(10)]
    for slot, each in enumerate(held):
        hints.note(each, slot)
    for _ in range(5000):
        hints.note(request(ttl=10.0), 0)  # acquired, and never used again
        now += 1.0
    assert len(hints) <= 1000
    assert [hints.of(each) for each in held] == list(range(10))
