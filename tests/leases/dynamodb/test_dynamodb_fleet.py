"""Many processes that share a DynamoDB table: some are killed, some acquire at the same time."""

from __future__ import annotations

import pytest
from tests.leases.dynamodb.servers import DynamoServer
from tests.leases.trials import FleetTrials


class DynamoTrials(FleetTrials):
    """The same tests, with processes that live longer.

    Starting a client takes longer here, and the lease of a killed process stays up to a second
    longer than its ttl, because a new client knows the server's time only to a second.
    """

    ttl = 5.0
    pause = (0.1, 0.6)
    kills = 15


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
