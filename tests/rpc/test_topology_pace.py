"""How often a topology is fetched in an outage, and how soon a move is found; virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    AsyncHandler,
    ConnectionConfig,
    Topology,
    TopologyError,
)
from moored.rpc.topology._follower import Follower
from moored.rpc.topology._source_pacing import SourcePacing
from moored.rpc.topology._sources import TopologySource
from moored.rpc.topology._topology import Advice, TopologyMixin
from moored.testing import Sim, assert_caught, mutant, scaled, simulate

from .scripted import ADDRESSES, World

pytestmark = pytest.mark.usefixtures("forkable")


class RecordingSource(TopologySource):
    """Records the time of each fetch."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.times: list[float] = []
        self.under_way = 0

    async def fetch(self) -> Topology:
        self.under_way += 1
        assert self.under_way == 1, "two fetches at once"
        await asyncio.sleep(0.01)
        self.under_way -= 1
        self.times.append(asyncio.get_running_loop().time())
        return self.world.topology()


def configs(number: int) -> list[ConnectionConfig]:
    return [ConnectionConfig.from_uri(f"http://caller{n}@{ADDRESSES[0]}") for n in range(number)]


async def call(handler: AsyncHandler, timeout: float) -> None:
    await handler.unary_unary("/any")(b"", timeout=timeout)


async def fails(handler: AsyncHandler, timeout: float) -> None:
    with pytest.raises(grpc.RpcError):
        await call(handler, timeout)


async def lose_connection(handler: AsyncHandler) -> None:
    """Call until the loss of the connection is noticed; from then on, calls wait for the next.

    gRPC reports the loss a little after it ends the first call; calls in between fail too.
    """
    before = handler.endpoint.live
    while handler.endpoint.live is before:
        await fails(handler, 3.0)


@dataclass
class Outage:
    world: World
    source: RecordingSource
    manager: AsyncConnectionManager
    handlers: list[AsyncHandler]


@contextlib.asynccontextmanager
async def outage(sim: Sim, connections: int = 1) -> AsyncIterator[Outage]:
    """Kill the primary after a quiet time, while all handlers are connected to it."""
    world = World(sim.rng)
    source = RecordingSource(world)
    async with AsyncConnectionManager(
        handler_factory=world.channel,
        credentials=world.credentials,
        fetch_topology=source,
        connect_timeout=3.0,
    ) as manager:
        handlers = [await manager.get_or_create(each) for each in configs(connections)]
        await asyncio.sleep(sim.random(0, 20))
        source.times.clear()
        world.fall(ADDRESSES[0])
        yield Outage(world, source, manager, handlers)


async def long_outage(sim: Sim) -> None:
    """Dial for 20 s, several times a second; the topology is fetched about once a second."""
    async with outage(sim, connections=3) as setup:
        begun = sim.now
        await asyncio.gather(*(lose_connection(each) for each in setup.handlers))
        await asyncio.gather(*(fails(each, 20.0) for each in setup.handlers))
        took = sim.now - begun
        assert took >= 20.0
        assert 0.7 * took <= len(setup.source.times) <= took + 3, (took, setup.source.times)


def test_topology_is_fetched_once_a_second_in_an_outage() -> None:
    simulate(long_outage, seeds=scaled(100, least=3))


class FailingSource(RecordingSource):
    """A source that fails immediately."""

    async def fetch(self) -> Topology:
        await super().fetch()
        raise TopologyError("not today")


class FailingSourceWithNewToken(FailingSource):
    """A failing source whose token was replaced since its last refusal."""

    renewed = True


async def failing_source(sim: Sim) -> None:
    """A source that fails during the first connect is queried about once a second, too."""
    world = World(sim.rng)
    source = sim.rng.choice((FailingSource, FailingSourceWithNewToken))(world)
    async with AsyncConnectionManager(
        handler_factory=world.channel, credentials=world.credentials, fetch_topology=source
    ) as manager:
        wanted = [manager.get_or_create(each, timeout=20.0) for each in configs(3)]
        for error in await asyncio.gather(*wanted, return_exceptions=True):
            assert "not today" in str(error)
        assert 0.7 * sim.now <= len(source.times) <= sim.now + 3, source.times


def test_failing_source_is_queried_once_a_second() -> None:
    simulate(failing_source, seeds=scaled(100, least=3))


def test_source_that_answered_since_its_failure_is_queried_immediately() -> None:
    """It was too slow for one caller, and in time for another."""
    pacing = SourcePacing()
    pacing.failed(None, 1.0)
    assert pacing.pause(1.0, 1.1) == pytest.approx(0.9)
    pacing.answered(Topology(1, ()), 1.0, 1.1)
    assert pacing.pause(1.0, 1.2) == 0.0


async def moves_late(sim: Sim) -> None:
    """Move the primary some time after it has failed: it is found within about a second."""
    async with outage(sim) as setup:
        [handler] = setup.handlers
        await lose_connection(handler)
        waiting = asyncio.ensure_future(call(handler, 30.0))
        await asyncio.sleep(sim.random(0, 6))
        setup.world.version, setup.world.primary = 2, ADDRESSES[1]
        moved_at = sim.now
        await waiting
        # A second, a fetch, a step of the dial, a connect and a call.
        assert sim.now - moved_at <= 1.0 + 0.02 + 0.25 + 0.1 + 0.3, sim.now - moved_at
        assert handler.address == ADDRESSES[1]


def test_primary_that_moves_during_an_outage_is_found_within_a_second() -> None:
    simulate(moves_late, seeds=scaled(200, least=6))


async def error_first(sim: Sim) -> None:
    """However young the connection is, its first failure fetches immediately."""
    async with outage(sim) as setup:
        setup.world.up[ADDRESSES[0]] = True
        fresh = ConnectionConfig.from_uri(f"http://fresh@{ADDRESSES[0]}")
        await asyncio.sleep(10.0)
        handler = await setup.manager.get_or_create(fresh)
        await asyncio.sleep(sim.random(0, 1))
        setup.world.version, setup.world.primary = 2, ADDRESSES[1]
        setup.world.fall(ADDRESSES[0])
        moved_at = sim.now
        await lose_connection(handler)
        await call(handler, 30.0)
        # A call, a check of the connection or a call meanwhile, and the same as above.
        assert sim.now - moved_at <= 0.3 + 0.3 + 0.02 + 0.25 + 0.1 + 0.3
        assert (handler.address, handler.generation) == (ADDRESSES[1], 2)


def test_first_failure_fetches_the_topology_immediately() -> None:
    simulate(error_first, seeds=scaled(200, least=6))


async def moves_and_lives(sim: Sim) -> None:
    """The old primary stays up and answers UNAVAILABLE: one such answer triggers a fetch."""
    async with outage(sim) as setup:
        [handler] = setup.handlers
        await lose_connection(handler)
        setup.world.up[ADDRESSES[0]] = True
        await call(handler, 30.0)
        await asyncio.sleep(sim.random(0, 6))
        setup.world.busy[ADDRESSES[0]] = True
        setup.world.version, setup.world.primary = 2, ADDRESSES[1]
        await fails(handler, 3.0)
        failed_at = sim.now
        while handler.address != ADDRESSES[1]:
            await asyncio.sleep(0.01)
            # A check of the connection, the pauses of refresher and source, and a connect.
            assert sim.now - failed_at <= 0.1 + 1.0 + 1.0 + 0.02 + 0.25 + 0.1, sim.now - failed_at
        await call(handler, 3.0)


def test_primary_that_moved_and_stays_up_is_left_within_seconds() -> None:
    simulate(moves_and_lives, seeds=scaled(200, least=6))


def does_not_hurry(self: Follower) -> None:
    pass


async def fresh_topology(sim: Sim) -> None:
    """A topology that the refresher has just fetched is not fetched again."""
    async with outage(sim) as setup:
        [handler] = setup.handlers
        setup.world.up[ADDRESSES[0]] = True
        await asyncio.sleep(30.0)
        setup.source.times.clear()
        setup.world.version, setup.world.primary = 2, ADDRESSES[1]
        [managed] = setup.manager._table
        managed.strategy._refresher.trigger()
        await asyncio.sleep(1.5)
        assert handler.address == ADDRESSES[1]
        assert len(setup.source.times) == 1


def test_fresh_topology_is_not_fetched_again() -> None:
    simulate(fresh_topology, seeds=scaled(100, least=3))


def fetches_each_time(self: SourcePacing, pace: float, now: float) -> float:
    return 0.0


def never_pauses(self: SourcePacing, pace: float, now: float) -> float:
    return 0.0


def never_fetches_twice(self: SourcePacing, pace: float, now: float) -> float:
    return max(0.0, self.answered_at + pace - now)


def ignores_the_fresh_topology(self: TopologyMixin, in_use: str) -> Advice:
    return Advice.RECONNECT


@pytest.mark.parametrize(
    ("scenario", "owner", "name", "replacement"),
    [
        pytest.param(
            *(long_outage, SourcePacing, "rest", fetches_each_time), marks=pytest.mark.soak
        ),
        (failing_source, SourcePacing, "pause", never_pauses),
        (error_first, SourcePacing, "rest", never_fetches_twice),
        (moves_and_lives, Follower, "hurry", does_not_hurry),
        (fresh_topology, TopologyMixin, "advise", ignores_the_fresh_topology),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_mutants_that_fetch_too_often_or_too_rarely_are_caught(
    scenario: Any, owner: Any, name: str, replacement: Any
) -> None:
    planted = mutant(owner, name, replacement, name=replacement.__name__)
    # One schedule in 30 shows the rarest of them.
    assert_caught(scenario, planted, within=400, clean=0)
