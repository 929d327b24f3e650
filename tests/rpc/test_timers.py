"""Timers that fire a little early, as uvloop's do, are set again for the rest."""

from __future__ import annotations

import asyncio

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Clock
from moored.rpc import AsyncGlobalStrategy, Member
from moored.rpc.topology._sources import CallableTopology
from moored.testing import Sim, scaled, simulate

from .handlers import ECHO, loss_noticed_async
from .servers import EchoServer
from .sides import LIMIT, Aio, config_of
from .test_simulation import random_faults

#: uvloop rounds to milliseconds.
SLACK = 0.001


@pytest.mark.usefixtures("forkable")
def test_invariants_hold_when_timers_fire_early_and_late() -> None:
    simulate(random_faults, scaled(200, least=1), timer_slack=SLACK)


async def refreshing(sim: Sim) -> None:
    """Refresh repeatedly: each refresh must fetch, even if its timer fires early."""
    fetched: list[float] = []
    loop = asyncio.get_running_loop()

    async def members() -> list[Member]:
        fetched.append(loop.time())
        return [Member("north", "http://north:1")]

    source = CallableTopology(members)
    follower = AsyncGlobalStrategy(fetch_topology=source, clock=Clock.current())
    for number in range(1, 10):
        await follower._refresh(source)
        assert len(fetched) == number, "the refresh returned the previous answer"


def test_refresh_whose_timer_fires_early_fetches_the_topology() -> None:
    simulate(refreshing, scaled(20, least=5), timer_slack=SLACK)


@pytest.mark.every_loop(always=True)
async def test_server_that_starts_late_is_connected_to() -> None:
    server = EchoServer()
    async with Aio() as side:
        connecting = asyncio.create_task(side.get(config_of(server), timeout=LIMIT))
        while not side.manager.get_stats()["counters"]["connect_failures"]:  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        try:
            assert await side.call(await connecting, ECHO, b"a") == b"a"
        finally:
            server.kill()


@pytest.mark.every_loop(always=True)
async def test_outage_ends_when_the_server_is_back() -> None:
    with EchoServer() as server:
        async with Aio() as side:
            channel = await side.get(config_of(server))
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", 5.0)
            await loss_noticed_async(channel)
            calls = [asyncio.create_task(side.call(channel, ECHO, b"a")) for _ in range(5)]
            await asyncio.to_thread(server.start)
            assert await asyncio.gather(*calls) == [b"a"] * 5
