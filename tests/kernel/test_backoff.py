"""Delays grow to the cap, jitter stays within its bounds, and nothing overflows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Backoff, BackoffExhausted
from moored.kernel._backoff import Jitter

pytestmark = pytest.mark.pure

seconds = st.floats(0.001, 1000)
factors = st.floats(1, 10)


def test_delays_double_from_start_to_max() -> None:
    backoff = Backoff(1.0, 10.0)
    assert [backoff.fail() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert backoff.attempts == 6


def test_success_returns_the_retry_time_and_starts_over() -> None:
    clock = FakeClock()
    backoff = Backoff(1.0, 10.0, clock=clock)
    assert backoff.succeed() == 0.0
    clock.advance(100)
    backoff.fail()
    clock.advance(1)
    backoff.fail()
    clock.advance(2.5)
    assert backoff.retrying_for == 3.5
    assert backoff.succeed() == 3.5
    assert backoff.attempts == 0
    assert backoff.retrying_for == 0.0
    assert backoff.fail() == 1.0


def test_max_attempts_counts_failures_and_the_error_has_the_numbers() -> None:
    clock = FakeClock()
    backoff = Backoff(max_attempts=3, clock=clock)
    assert backoff.fail() == 1.0
    clock.advance(3)
    assert backoff.fail() == 2.0
    with pytest.raises(
        BackoffExhausted, match=r"after 3 failed attempts \(max_attempts=3\) in 3.0 s; .*"
    ):
        backoff.fail()
    with pytest.raises(BackoffExhausted, match="after 4 failed attempts"):
        backoff.fail()
    backoff.succeed()
    assert backoff.fail() == 1.0


def test_fresh_copies_the_settings_and_not_the_failures() -> None:
    clock = FakeClock()
    backoff = Backoff(2, 50, factor=3, jitter=0.5, max_attempts=9, clock=clock)
    backoff.fail()
    fresh = backoff.fresh()
    assert fresh.attempts == 0
    for name in ("start", "max", "factor", "jitter", "max_attempts", "clock"):
        assert getattr(fresh, name) == getattr(backoff, name)


def test_thousands_of_failures_do_not_overflow() -> None:
    backoff = Backoff(1.0, 60.0, factor=1e6)
    assert {backoff.fail() for _ in range(5000)} == {1.0, 60.0}


def test_the_repr_shows_settings_and_state() -> None:
    clock = FakeClock()
    backoff = Backoff(1, 10, jitter="full", max_attempts=5, clock=clock)
    assert repr(backoff) == "<Backoff 1 s x2 to 10 s, jitter full: nothing failed>"
    backoff.fail()
    clock.advance(7)
    assert repr(backoff) == "<Backoff 1 s x2 to 10 s, jitter full: 1 of 5 failed in 7.0 s>"


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="Backoff: ") as caught:
        Backoff(0, -1, factor=0.5, jitter="some", max_attempts=0)  # type: ignore[arg-type]
    for name in ("start=0", "max=-1", "factor=0.5", "jitter='some'", "max_attempts=0"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("start", "longest", "factor", "jitter"),
    [
        (math.nan, 1.0, 2.0, "none"),
        (1.0, math.inf, 2.0, "none"),
        (1.0, math.nan, 2.0, "none"),
        (1.0, 2.0, math.inf, "none"),
        (1.0, 2.0, 2.0, 1.5),
        (1.0, 2.0, 2.0, -0.1),
        (1.0, 2.0, 2.0, math.nan),
    ],
)
def test_invalid_numbers_are_refused(
    start: float, longest: float, factor: float, jitter: Jitter
) -> None:
    with pytest.raises(ValueError, match="must be"):
        Backoff(start, longest, factor=factor, jitter=jitter)


def bounds(jitter: Jitter, base: float) -> tuple[float, float]:
    match jitter:
        case "none":
            return base, base
        case "full":
            return 0.0, base
        case "half":
            return base, base * 1.5
        case _:
            return base * (1 - jitter), base * (1 + jitter)


@given(
    start=seconds,
    more=seconds,
    factor=factors,
    jitter=st.one_of(st.sampled_from(["none", "full", "half"]), st.floats(0, 1)),
    seed=st.integers(),
)
def test_every_delay_is_within_its_bounds(
    start: float, more: float, factor: float, jitter: Jitter, seed: int
) -> None:
    backoff = Backoff(start, start + more, factor=factor, jitter=jitter, clock=FakeClock(seed))
    for attempt in range(20):
        base = min(start * factor**attempt, start + more)
        low, high = bounds(jitter, base)
        wait = backoff.fail()
        assert low * (1 - 1e-9) <= wait <= high * (1 + 1e-9)


@pytest.mark.parametrize("jitter", ["full", "half", 0.25])
def test_jitter_uses_the_whole_of_its_range(jitter: Jitter) -> None:
    clock = FakeClock(1)
    low, high = bounds(jitter, 4.0)
    waits = [Backoff(4, 4, jitter=jitter, clock=clock).fail() for _ in range(500)]
    assert min(waits) < low + (high - low) * 0.05
    assert max(waits) > high - (high - low) * 0.05
    assert low <= min(waits)
    assert max(waits) < high
