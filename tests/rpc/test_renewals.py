"""Channels are renewed before max_age, also after a failed renewal; virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    AsyncGlobalStrategy,
    ConnectionConfig,
    StaticTopology,
)
from moored.rpc._endpoint import Endpoint
from moored.rpc.topology._follower import Follower
from moored.testing import Sim, assert_caught, mutant, scaled, simulate

from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")

AGE = 20.0
#: The longest time that a simulated connect takes.
CONNECT = 0.05


async def renewals_that_fail(sim: Sim) -> None:
    """Renewals fail for a while; soon after that, one succeeds."""
    world = World(sim.rng)
    broken_until = AGE * sim.random(0.85, 1.5)

    def make(config: ConnectionConfig) -> Any:
        if 1.0 < sim.now < broken_until:
            raise OSError("a bad moment")
        return world.channel(config)

    async with AsyncConnectionManager(
        handler_factory=make, credentials=world.credentials, max_age=AGE
    ) as manager:
        handler = await manager.get_or_create(ConnectionConfig.from_uri(f"http://{ADDRESSES[0]}"))
        while handler.generation == 1:  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)
        late = sim.now - max(broken_until, AGE)
        assert late <= AGE / 10 + CONNECT + 0.02, late
        began = sim.now
        while handler.generation == 2:  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)
        assert 0.9 * AGE - 0.02 <= sim.now - began <= AGE + CONNECT + 0.02, (
            "the next renewal was not after max_age"
        )


def test_failed_renewal_is_retried_soon() -> None:
    simulate(renewals_that_fail, seeds=scaled(100, least=3))


def _waits_for_a_whole_age(self: Endpoint, now: float, *, again: bool = False) -> None:
    _age(self, now)


_age = Endpoint._age


def test_mutant_that_waits_a_whole_max_age_is_caught() -> None:
    planted = mutant(
        Endpoint,
        "_age",
        _waits_for_a_whole_age,
        name="a failed renewal waits for another max_age",
    )
    assert_caught(renewals_that_fail, planted, within=50, clean=0)


async def renewals_of_a_replica(sim: Sim) -> None:
    """Each renewed channel leads to the nearest replica, as long as that is healthy."""
    world = World(sim.rng)
    near = {ADDRESSES[1]: 0.001, ADDRESSES[0]: 0.1}
    strategy = AsyncGlobalStrategy(
        role="any",
        handler_factory=world.channel,
        fetch_topology=StaticTopology([f"http://{each}" for each in ADDRESSES]),
        latencies=lambda: near,
    )
    async with AsyncConnectionManager(
        strategy=lambda config: strategy, credentials=world.credentials, max_age=AGE
    ) as manager:
        handler = await manager.get_or_create(ConnectionConfig.from_uri("http://replicas"))
        while handler.generation < 5:
            assert handler.address == ADDRESSES[1]
            await asyncio.sleep(0.1)
        # A replica that fails is left.
        world.fall(ADDRESSES[1])
        while handler.address != ADDRESSES[0]:
            with contextlib.suppress(grpc.RpcError):
                await handler.unary_unary("/test.Echo/Echo")(b"", timeout=5.0)


def test_renewal_stays_at_the_nearest_replica() -> None:
    simulate(renewals_of_a_replica, seeds=scaled(20, least=3))


def test_mutant_that_avoids_a_healthy_replica_is_caught() -> None:
    planted = mutant(
        Follower, "arrived", lambda self, address: None, name="a healthy replica is avoided"
    )
    assert_caught(renewals_of_a_replica, planted, within=5, clean=0)
