"""When connections are replaced before they expire."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.reservoir._schedule import first_replacement

pytestmark = pytest.mark.pure

# Whole numbers as floats: then sums and differences are exact.
seconds = st.integers(0, 10_000).map(float)
ends = st.lists(seconds, min_size=1, max_size=40)


def replacements(ends: list[float], every: float) -> list[tuple[float, float]]:
    """When each is replaced, with its end, if the earliest goes whenever a replacement is due."""
    left = sorted(ends)
    done = []
    while left:
        done.append((first_replacement(left, every), left.pop(0)))
    return done


def test_without_connections_nothing_is_due() -> None:
    assert first_replacement([], 10.0) == math.inf


def test_a_single_connection_is_replaced_at_its_end() -> None:
    assert first_replacement([100.0], 10.0) == 100.0


def test_of_two_that_end_together_one_is_replaced_earlier() -> None:
    assert first_replacement([100.0, 100.0], 10.0) == 90.0


def test_connections_that_end_far_apart_are_replaced_at_their_ends() -> None:
    assert replacements([100.0, 150.0, 200.0], 10.0) == [(100.0,) * 2, (150.0,) * 2, (200.0,) * 2]


def test_the_order_of_the_ends_does_not_matter() -> None:
    assert first_replacement([130.0, 100.0, 101.0], 10.0) == 91.0


@given(ends, seconds)
def test_each_is_replaced_before_its_end(ends: list[float], every: float) -> None:
    assert all(when <= end for when, end in replacements(ends, every))


@given(ends, seconds)
def test_replacements_are_at_least_the_interval_apart(ends: list[float], every: float) -> None:
    times = [when for when, _ in replacements(ends, every)]
    assert all(later - one >= every for one, later in pairwise(times))


@given(ends, seconds)
def test_no_schedule_could_begin_later(ends: list[float], every: float) -> None:
    """If the first replacement came later than computed, another one would be too late."""
    due = first_replacement(ends, every)
    slack = [end - (due + place * every) for place, end in enumerate(sorted(ends))]
    assert min(slack) == 0.0


@given(ends, seconds, seconds)
def test_nothing_is_due_while_there_is_time_enough(
    slack: list[float], every: float, now: float
) -> None:
    ends = [now + place * every + more for place, more in enumerate(slack)]
    assert first_replacement(ends, every) >= now


@given(st.integers(1, 200), st.integers(1, 1000).map(float))
def test_connections_opened_together_are_spread_over_their_lifetime(
    number: int, every: float
) -> None:
    life = number * every
    times = [when for when, _ in replacements([life] * number, every)]
    assert times == [every * (place + 1) for place in range(number)]


@given(ends, seconds, seconds)
def test_a_step_of_the_clock_moves_all_alike(ends: list[float], every: float, by: float) -> None:
    moved = first_replacement([end + by for end in ends], every)
    assert moved == first_replacement(ends, every) + by
