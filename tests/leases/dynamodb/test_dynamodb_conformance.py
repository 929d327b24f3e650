"""The store in DynamoDB, in both layouts; at full scale each against both servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.leases.conformance import (
    LeaseConformance,
    OpenStore,
    RateConformance,
    StoreConformance,
    StoreTests,
    opening,
)
from tests.leases.dynamodb.conftest import well_known
from tests.leases.dynamodb.servers import DynamoServer

from moored.kernel import Clock
from moored.leases import Store
from moored.leases._dynamodb._time import ServerTime
from moored.leases.dynamodb import CounterStore, DynamoConfig, SlotStore
from moored.testing import scaled


class DynamoStores(StoreTests):
    """Opens stores that know the server's time as well as one does after some minutes of use."""

    ttl = 0.6
    many = scaled(250, least=30)
    turns = scaled(15, least=6)
    layout = "slots"

    async def expire(self) -> None:
        # A lease ends later by the width of the bounds of the server's time: on a busy machine, by
        # hundreds of milliseconds.
        await self.pass_time(self.ttl + 1.0)

    @pytest.fixture
    async def open_store(
        self, server: DynamoServer, table: str, clocks: dict[str, ServerTime]
    ) -> AsyncIterator[OpenStore]:
        # The driver takes hundreds of steps for a request; debugging each would be most of it.
        asyncio.get_running_loop().set_debug(False)
        url = server.url(table, layout=self.layout, skew=0, sweep_every=0.5)
        config = DynamoConfig.from_url(url)
        kind = SlotStore if self.layout == "slots" else CounterStore
        time = well_known(server, clocks)

        def make() -> Store:
            return kind(config, clock=Clock.system(), time=time)

        async with opening(make) as opener:
            yield opener


class TestSlots(DynamoStores, StoreConformance):
    pass


class TestCounter(DynamoStores, LeaseConformance):
    layout = "counter"


@pytest.mark.soak  # both layouts share the code of rate limits
class TestCounterRate(DynamoStores, RateConformance):
    layout = "counter"
