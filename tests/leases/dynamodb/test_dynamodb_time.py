"""The bounds for the server's time: they always hold, and become narrow."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moored.kernel import Clock
from moored.leases._dynamodb._time import ServerTime
from moored.testing import Mutant, mutant

TRUE = 1_800_000_000.0


class Bench:
    """A server with a clock of its own, and a client that asks it."""

    def __init__(self, *, wall: float = 0.0, speed: float = 1.0, skew: float = 0.0) -> None:
        self.now = 1000.0
        self.speed = speed
        self.step = 0.0
        #: How far the client's wall clock is ahead of the server's.
        self.wall = wall
        self.time = ServerTime(
            Clock(lambda: self.now, lambda: self.server() + self.wall), skew=skew
        )

    def server(self) -> float:
        return TRUE + self.step + (self.now - 1000.0) * self.speed

    def ask(self, *, there: float = 0.0, back: float = 0.0, off: float = 0.0) -> None:
        sent = self.now
        self.now += there
        date = formatdate(int(self.server() + off), usegmt=True)
        self.now += back
        self.time.observe(date, sent=sent, received=self.now)

    def width(self) -> float:
        return self.time.latest() - self.time.earliest()

    def holds(self) -> bool:
        return self.time.earliest() <= self.server() <= self.time.latest()


requests = st.lists(
    st.tuples(
        st.floats(0.0, 30.0),  # pause before
        st.floats(0.0, 2.0),  # on the way there
        st.floats(0.0, 2.0),  # and back
        st.floats(-1.0, 1.0),  # which server answers: how far its clock is off, in skews
    ),
    min_size=1,
    max_size=40,
)


@given(
    requests=requests,
    wall=st.floats(-1e6, 1e6),
    drift=st.floats(-150e-6, 150e-6),
    skew=st.sampled_from([0.0, 0.1, 3.0]),
)
def test_the_true_time_is_always_within_the_bounds(
    requests: list[tuple[float, float, float, float]], wall: float, drift: float, skew: float
) -> None:
    bench = Bench(wall=wall, speed=1.0 + drift, skew=skew)
    for pause, there, back, off in requests:
        bench.now += pause
        bench.ask(there=there, back=back, off=off * skew)
        assert bench.holds()
        bench.now += pause
        assert bench.holds()
        assert bench.time.earliest() <= bench.time.likely() <= bench.time.latest()
    assert bench.time.corrections <= 1  # the first answer may correct the wall clock, no later one


pair = st.tuples(st.floats(-1e5, 1e5), st.lists(st.floats(0.0, 1.5), min_size=1, max_size=12))


@given(holder=pair, taker=pair, ttl=st.floats(0.1, 300.0), early=st.floats(0.0, 1.0))
def test_no_lease_expires_early_whatever_the_clocks_say(
    holder: tuple[float, list[float]], taker: tuple[float, list[float]], ttl: float, early: float
) -> None:
    never_early(holder, taker, ttl, early)


WRITTEN = mutant(ServerTime, "latest", ServerTime.likely, name="written by the wall clock")
TAKEN = mutant(ServerTime, "earliest", ServerTime.latest, name="taken by the latest time")


@pytest.mark.parametrize(("defect", "trips"), [(WRITTEN, [0.1] * 40), (TAKEN, [0.3])])
def test_a_client_that_trusts_its_wall_clock_is_detected(
    defect: Mutant, trips: list[float]
) -> None:
    slow, fast = (-1e5, [0.3]), (1e5, trips)
    never_early(slow, fast, 10.0, 0.0)
    with defect, pytest.raises(AssertionError):
        never_early(slow, fast, 10.0, 0.0)


def never_early(
    holder: tuple[float, list[float]], taker: tuple[float, list[float]], ttl: float, early: float
) -> None:
    """One machine writes a lease, another reads it just before its holder's deadline."""
    benches = []
    for wall, trips in (holder, taker):
        bench = Bench(wall=wall)
        for trip in trips:
            bench.now += trip / 3
            bench.ask(there=trip / 2, back=trip / 2)
        benches.append(bench)
    writer, reader = benches
    writer.now = reader.now = max(writer.now, reader.now)
    ends = writer.time.end_of(ttl)
    reader.now += ttl * (1 - early)
    assert ends >= reader.time.reached()


def test_bounds_narrow_from_a_second_to_a_round_trip() -> None:
    bench, chance = Bench(wall=3600.0), random.Random(1)
    bench.ask(there=0.01, back=0.01)
    assert 1.0 <= bench.width() <= 1.03
    for _ in range(200):
        bench.now += chance.uniform(0.0, 1.0)
        bench.ask(there=0.01, back=0.01)
    assert bench.width() < 0.1


def test_the_wall_clock_is_believed_only_within_the_bounds() -> None:
    right, ahead, behind = Bench(wall=0.0), Bench(wall=50.0), Bench(wall=-50.0)
    for bench in (right, ahead, behind):
        bench.ask(there=0.01, back=0.01)
    assert right.time.likely() == pytest.approx(right.server(), abs=1e-6)
    assert ahead.time.likely() == ahead.time.latest()
    assert behind.time.likely() == behind.time.earliest()
    assert ahead.time.wall_error() == pytest.approx(50.0, abs=1.1)
    assert right.time.wall_error() == 0.0


def test_a_change_of_the_wall_clock_does_not_move_the_bounds() -> None:
    bench = Bench()
    bench.ask()
    before = bench.time.earliest(), bench.time.latest()
    bench.wall = -86400.0
    assert (bench.time.earliest(), bench.time.latest()) == before
    assert bench.time.likely() == before[0]


def test_a_suspended_machine_corrects_its_bounds_at_the_next_response() -> None:
    bench = Bench()
    bench.ask()
    assert bench.time.corrections == 0
    bench.step = 600.0  # the world went on, and the monotonic clock did not
    assert not bench.holds()
    bench.ask()
    assert bench.holds()
    assert bench.time.corrections == 1


def test_bounds_widen_without_responses() -> None:
    bench = Bench()
    bench.ask()
    before = bench.width()
    bench.now += 3600.0
    assert bench.width() == pytest.approx(before + 2 * 200e-6 * 3600.0)


def test_without_a_date_the_wall_clock_is_trusted_to_a_second() -> None:
    bench = Bench(wall=0.4)
    for date in (None, "yesterday", "Sun, 99 Nov 2026 03:13:01 GMT"):
        bench.time.observe(date, sent=bench.now, received=bench.now)
    assert bench.holds()
    assert bench.width() == pytest.approx(2.0)


def test_a_date_without_a_zone_is_in_utc() -> None:
    bench = Bench()
    date = formatdate(int(bench.server()))
    assert date.endswith("-0000")
    bench.time.observe(date, sent=bench.now, received=bench.now)
    assert bench.holds()
    assert bench.time.corrections == 0
