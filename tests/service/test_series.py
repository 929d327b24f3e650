"""Which numbers are drawn: values, rates, latencies, and systems that fail or begin anew."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import isfinite
from typing import Any

import pytest

from moored.kernel import Tree
from moored.reservoir import BUCKETS, Statistics
from moored.service._series import FEW, Sampler, quantile

pytestmark = pytest.mark.pure


class Shown:
    """A system with these numbers."""

    def __init__(self, **numbers: Any) -> None:
        self.numbers: Mapping[str, Any] | None = numbers

    def statistics(self) -> Mapping[str, Any]:
        if self.numbers is None:
            raise ConnectionError("gone")
        return self.numbers

    def explain(self) -> str:
        return ""

    def tree(self) -> Tree:
        return Tree("", "running", 0.0)


def pool(**numbers: Any) -> Shown:
    zero = dict.fromkeys(Statistics._fields, 0)
    return Shown(**{**zero, "max_size": 12, "latency": (0,) * (len(BUCKETS) + 1), **numbers})


def test_a_counter_is_drawn_as_its_rate_and_a_gauge_as_it_is() -> None:
    db = pool(in_use=3, checkouts=100)
    sampler = Sampler({"app/db/pool": db}, {"db": "pool"})
    assert sampler.sample(10.0) == {"db.in_use": 3.0, "db.waiting": 0.0}
    db.numbers = pool(in_use=4, checkouts=107).numbers
    found = sampler.sample(12.0)
    assert (found["db.in_use"], found["db.checkouts"], found["db.opened"]) == (4.0, 3.5, 0.0)
    assert sampler.mains == {"db": "db.in_use"}
    assert sampler.series["db.in_use"].limit == 12
    assert sampler.series["db.checkouts"].unit == "/s"


def test_a_system_that_begins_anew_or_was_gone_has_no_rate_at_first() -> None:
    load = Shown(counters={"writes": 50})
    systems: dict[str, Any] = {"app/load/run": load}
    sampler = Sampler(systems, {"load": "component"})
    sampler.sample(0.0)
    load.numbers = {"counters": {"writes": 4}}
    assert sampler.sample(2.0) == {}
    load.numbers = {"counters": {"writes": 8}}
    assert sampler.sample(4.0) == {"load.writes": 2.0}
    del systems["app/load/run"]
    assert sampler.sample(6.0) == {}
    systems["app/load/run"] = load
    assert sampler.sample(8.0) == {}


def test_a_system_whose_numbers_cannot_be_read_is_a_gap_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Shown()
    broken.numbers = None
    sampler = Sampler(
        {"app/a/run": broken, "app/b/pool": pool(in_use=1)}, {"a": "component", "b": "pool"}
    )
    for now in (0.0, 2.0):
        assert sampler.sample(now)["b.in_use"] == 1.0
    assert [each.getMessage() for each in caplog.records] == [
        "the numbers of a cannot be read: gone (ConnectionError)"
    ]


def test_a_counter_that_is_no_finite_number_is_a_gap_and_the_others_are_drawn() -> None:
    values: list[Any] = [Decimal(3), float("nan"), 10**400, "seven", None]
    for odd in values:
        systems: dict[str, Any] = {
            "app/a/run": Shown(counters={"odd": odd, "done": 1}),
            "app/b/run": Shown(counters={"done": 1}),
        }
        sampler = Sampler(systems, {"a": "component", "b": "component"})
        sampler.sample(0.0)
        found = sampler.sample(2.0)
        assert found["b.done"] == 0.0
        assert all(isfinite(each) for each in found.values())


def test_of_many_parts_the_main_number_and_the_flow_are_drawn() -> None:
    names = [f"db{n}" for n in range(FEW + 1)]
    systems: dict[str, Any] = {f"app/{name}/pool": pool() for name in names}
    sampler = Sampler(systems, dict.fromkeys(names, "pool"))
    sampler.sample(0.0)
    assert set(sampler.series) == {
        f"{name}.{number}" for name in names for number in ("in_use", "checkouts")
    }


def test_parts_that_are_not_shown_have_no_series() -> None:
    assert Sampler({"app/buttons/run": pool()}, {}).sample(0.0) == {}


def test_waits_are_those_since_the_last_sample() -> None:
    counts = [0] * (len(BUCKETS) + 1)
    db = pool(latency=tuple(counts))
    sampler = Sampler({"app/db/pool": db}, {"db": "pool"})
    assert "db.wait_50" not in sampler.sample(0.0)
    counts[0], counts[BUCKETS.index(1.0)] = 90, 10
    db.numbers = pool(latency=tuple(counts)).numbers
    found = sampler.sample(2.0)
    assert found["db.wait_50"] <= 0.0001
    assert 0.8 < found["db.wait_99"] <= 1.0
    assert "db.wait_50" not in sampler.sample(4.0)  # a gap: nobody asked


@pytest.mark.parametrize("seconds", [0.00012, 0.003, 0.07, 1.7, 9.0])
def test_a_quantile_is_off_by_half_an_octave_at_most(seconds: float) -> None:
    counts = [0] * (len(BUCKETS) + 1)
    counts[next(n for n, end in enumerate(BUCKETS) if seconds <= end)] = 1000
    for share in (0.01, 0.5, 0.99):
        found = quantile(counts, share)
        assert found is not None
        assert seconds / 1.5 < found < seconds * 1.5


def test_waits_beyond_the_last_bucket_count_as_its_end() -> None:
    assert quantile([0] * len(BUCKETS) + [3], 0.5) == BUCKETS[-1]
    assert quantile([0] * (len(BUCKETS) + 1), 0.5) is None
