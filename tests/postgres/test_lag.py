"""The age of the oldest unacknowledged transaction, with bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.postgres.stream._lag import EVERY, MOST, Lag

pytestmark = pytest.mark.pure


class Stream:
    """Transactions that end at 1, 2, 3, …, with a note for each beside those of `Lag`."""

    def __init__(self) -> None:
        self.lag = Lag()
        self.now = 0.0
        self.seen = 0
        self.flushed = 0
        self.came: dict[int, float] = {}

    def receive(self, pause: float) -> None:
        self.now += pause
        if self.now >= self.lag.due:
            self.lag.note(self.seen, self.flushed, self.now)
        self.seen += 1
        self.came[self.seen] = self.now

    def said(self) -> float:
        return self.lag.seconds(self.flushed, self.seen, self.now)

    def true(self) -> float:
        waiting = [at for end, at in self.came.items() if end > self.flushed]
        return self.now - waiting[0] if waiting else 0.0


def test_the_lag_is_zero_if_all_is_acknowledged() -> None:
    it = Stream()
    assert it.said() == 0.0
    it.receive(1.0)
    it.flushed = 1
    it.now += 4.0
    assert it.said() == 0.0


def test_the_lag_is_the_age_of_the_oldest_unacknowledged_transaction() -> None:
    it = Stream()
    for _ in range(3):
        it.receive(1.0)
    it.now = 5.0
    assert it.said() == 4.0
    it.flushed = 2
    assert it.said() == 2.0


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 1)), min_size=1, max_size=80))
def test_the_lag_is_exact_to_its_resolution(steps: list[tuple[float, float]]) -> None:
    it = Stream()
    for pause, acknowledged in steps:
        it.receive(pause)
        it.flushed = max(it.flushed, int(it.seen * acknowledged))
        assert 0 <= it.said() - it.true() <= EVERY + 1e-9


def test_a_stuck_consumer_needs_bounded_memory() -> None:
    it = Stream()
    for _ in range(20 * MOST):
        it.receive(EVERY)
    assert len(it.lag) <= MOST
    assert it.said() == it.true()
    it.flushed = it.seen
    it.receive(100.0)  # it has caught up: exact again
    assert len(it.lag) == 0
    assert it.said() == 0.0
    assert it.lag.due == it.now + EVERY
