"""Tests of a networked store with many processes; a subclass defines its URL.

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
    """The tests; a subclass defines `url`, and may change the numbers."""

    #: The ttl of leases: several times the response time of a busy store.
    ttl = 1.5
    #: Seconds between two kills, from and to, and the least number of kills.
    pause = (0.02, 0.2)
    kills = scaled(30, least=12)
    #: Tokens per second, and the burst.
    rate = 100.0
    burst = 40

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError("a subclass defines this fixture")

    def test_the_limit_holds_while_processes_are_killed(self, url: str, tmp_path: Path) -> None:
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            storm(
                fleet,
                workers=scaled(20, least=14),
                limit=LIMIT,
                seconds=scaled(30),
                seed=base_seed(),
                pause=self.pause,
                kills=self.kills,
            )
            fleet.kill_all()
            seen = fleet.events()
            assert overfull(beliefs(seen), LIMIT) is None
            happened = counts(seen)
            assert happened["crashed"] == 0, seen
            # Leases were released, and lost with their holders.
            assert happened["released"] > self.kills // 3
            assert fleet.refill(LIMIT) < 3 * self.ttl + 5.0

    def test_simultaneous_acquires_get_exactly_the_limit(self, url: str, tmp_path: Path) -> None:
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            assert one_shot(fleet, workers=20, limit=LIMIT) == LIMIT

    @pytest.mark.parametrize(
        ("tokens", "batch"),
        [*(pytest.param(1, each, marks=pytest.mark.soak) for each in (1, 10)), (3, 5)],
    )
    def test_no_window_exceeds_the_rate_limit(
        self, url: str, tmp_path: Path, tokens: int, batch: int
    ) -> None:
        seconds = scaled(20)
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            takers(fleet, self.rate, self.burst, tokens=tokens, batch=batch)
            time.sleep(seconds)
            # The figure itself is measured in benchmarks/leases.py.
            fleet.wait_until(lambda seen: seen["took"] * tokens > self.rate * seconds / 4)
            fleet.kill_all()
            used = grants(fleet.events())
        assert excess(used, rate=self.rate, burst=self.burst) is None


def takers(
    fleet: Fleet, rate: float, burst: int, *, processes: int = 4, tokens: int = 1, batch: int = 1
) -> None:
    """Start processes that take tokens as fast as they can, and wait until all run."""
    for _ in range(processes):
        fleet.spawn("take", rate=rate, burst=burst, tokens=tokens, batch=batch)
    fleet.wait_for("ready", processes)
