"""Many processes on DynamoDB: killed, and all at once."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from tests.leases.dynamodb.servers import DynamoServer
from tests.leases.fleet import Fleet
from tests.leases.observer import beliefs, counts, overfull
from tests.leases.trials import LIMIT, FleetTrials

from moored.testing import base_seed, scaled


class DynamoTrials(FleetTrials):
    """The same trials, with processes that live a little longer.

    To start is dear here, and a lease of a killed process blocks its place for a second more than
    its ttl, because that is how well a new client knows the server's time.
    """

    ttl = 2.0

    def test_never_over_the_limit_and_none_stuck(self, url: str, tmp_path: Path) -> None:
        chance = random.Random(base_seed())
        seeds = itertools.count(base_seed())
        with Fleet(url, tmp_path, ttl=self.ttl) as fleet:
            for _ in range(20):
                fleet.spawn("hold", limit=LIMIT, hold=0.6, seed=next(seeds))
            end = time.monotonic() + scaled(30, least=5)
            while time.monotonic() < end:
                time.sleep(chance.uniform(0.1, 0.6))
                fleet.kill(chance.choice(fleet.pids))
                fleet.spawn("hold", limit=LIMIT, hold=0.6, seed=next(seeds))
            fleet.kill_all()
            seen = fleet.events()
            assert overfull(beliefs(seen), LIMIT) is None
            happened = counts(seen)
            assert happened["crashed"] == 0, seen
            assert fleet.killed > 8
            assert happened["acquired"] > 15
            assert happened["released"] > 5
            assert fleet.refill(LIMIT) < 3 * self.ttl


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ministack", "dynamo_local"])
class TestSlotsFleet(DynamoTrials):
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest, kind: str, table: str) -> str:
        server: DynamoServer = request.getfixturevalue(kind)
        return server.url(table)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ministack", "dynamo_local"])
class TestCounterFleet(DynamoTrials):
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest, kind: str, table: str) -> str:
        server: DynamoServer = request.getfixturevalue(kind)
        return server.url(table, layout="counter", sweep_every=0.5)
