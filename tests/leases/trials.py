"""What many processes must show of any networked store; a subclass gives its URL.

::

    class TestRedisFleet(FleetTrials):
        @pytest.fixture
        def url(self, redis_url: str) -> str:
            return redis_url
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.leases.fleet import Fleet, one_shot, storm
from tests.leases.observer import beliefs, counts, excess, grants, overfull

from moored.testing import base_seed, scaled

__all__ = ["FleetTrials", "takers"]

LIMIT = 10


class FleetTrials:
    """The trials; a subclass gives `url`, and may change the numbers."""

    #: Seconds that a lease lives: several times what a crowded store takes to answer.
    ttl = 1.5
    #: Tokens per second, and at once.
    rate = 100.0
    burst = 40

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError("a subclass gives this fixture")

    def test_never_over_the_limit_and_none_stuck(self, url: str, tmp_path: Path) -> None:
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            storm(fleet, limit=LIMIT, seconds=scaled(30, least=4), seed=base_seed())
            fleet.kill_all()
            seen = fleet.events()
            assert overfull(beliefs(seen), LIMIT) is None
            happened = counts(seen)
            assert happened["crashed"] == 0, seen
            # It was a storm: leases were renewed, given back, and lost with their holders.
            assert fleet.killed > 30
            assert happened["acquired"] > 30
            assert happened["released"] > 10
            assert fleet.refill(LIMIT) < 3 * self.ttl

    def test_exactly_the_limit_wins(self, url: str, tmp_path: Path) -> None:
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            assert one_shot(fleet, workers=20, limit=LIMIT) == LIMIT

    @pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1, 10), (3, 5)])
    def test_no_window_holds_more_than_it_may(
        self, url: str, tmp_path: Path, tokens: int, batch: int
    ) -> None:
        seconds = scaled(20, least=2)
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            begin = takers(fleet, self.rate, self.burst, tokens=tokens, batch=batch)
            time.sleep(seconds)
            fleet.kill_all()
            used = grants(fleet.events())
        assert excess(used, rate=self.rate, burst=self.burst) is None
        # The figure itself is measured in benchmarks/leases.py.
        within = sum(n for at, n in used if at >= begin)
        assert within > self.rate * seconds / 4


def takers(
    fleet: Fleet, rate: float, burst: int, *, processes: int = 4, tokens: int = 1, batch: int = 1
) -> int:
    """Processes that use a rate limit as fast as they may; returns when all of them did."""
    for _ in range(processes):
        fleet.spawn("take", rate=rate, burst=burst, tokens=tokens, batch=batch)
    fleet.wait_for("ready", processes)
    return time.monotonic_ns()
