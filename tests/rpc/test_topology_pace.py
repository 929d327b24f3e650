"""How often a topology is asked for in an outage, and how soon a move is found; virtual time."""

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


class Directory(TopologySource):
    """Counts who asks, and when."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.times: list[float] = []
        self.under_way = 0

    async def fetch(self, timeout: float | None = None) -> Topology:
        self.under_way += 1
        assert self.under_way == 1, "one question at a time"
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


async def lost(handler: AsyncHandler) -> None:
    """Call until it is known that the connection is lost; from then on calls wait for the next.

    gRPC reports the loss a little after it ends the first call. What is called meanwhile fails too.
    """
    before = handler._live
    while handler._live is before:
        await fails(handler, 3.0)


@dataclass
class Outage:
    world: World
    directory: Directory
    manager: AsyncConnectionManager
    handlers: list[AsyncHandler]


@contextlib.asynccontextmanager
async def outage(sim: Sim, connections: int = 1) -> AsyncIterator[Outage]:
    """A primary that falls while all have a connection, after a quiet time."""
    world = World(sim.rng)
    directory = Directory(world)
    async with AsyncConnectionManager(
        handler_factory=world.channel,
        credentials=world.credentials,
        fetch_topology=directory,
        connect_timeout=3.0,
    ) as manager:
        handlers = [await manager.get_or_create(each) for each in configs(connections)]
        await asyncio.sleep(sim.random(0, 20))
        directory.times.clear()
        world.fall(ADDRESSES[0])
        yield Outage(world, directory, manager, handlers)


async def long_outage(sim: Sim) -> None:
    """It is dialled for 20 s, several times a second, and asked for about once a second."""
    async with outage(sim, connections=3) as day:
        begun = sim.now
        await asyncio.gather(*(lost(each) for each in day.handlers))
        await asyncio.gather(*(fails(each, 20.0) for each in day.handlers))
        took = sim.now - begun
        assert took >= 20.0
        assert 0.7 * took <= len(day.directory.times) <= took + 3, (took, day.directory.times)


def test_in_an_outage_the_topology_is_asked_for_once_a_second() -> None:
    simulate(long_outage, seeds=scaled(100, least=8))


class Closed(Directory):
    """Says at once that it tells nothing."""

    async def fetch(self, timeout: float | None = None) -> Topology:
        await super().fetch()
        raise TopologyError("not today")


class Renewed(Closed):
    """Has had another token since it was refused, long ago."""

    renewed = True


async def nobody_tells(sim: Sim) -> None:
    """The first connection is wanted, and a source that fails is asked once a second, too."""
    world = World(sim.rng)
    directory = sim.rng.choice((Closed, Renewed))(world)
    async with AsyncConnectionManager(
        handler_factory=world.channel, credentials=world.credentials, fetch_topology=directory
    ) as manager:
        wanted = [manager.get_or_create(each, timeout=20.0) for each in configs(3)]
        for error in await asyncio.gather(*wanted, return_exceptions=True):
            assert "not today" in str(error)
        assert 0.7 * sim.now <= len(directory.times) <= sim.now + 3, directory.times


def test_a_source_that_fails_at_once_is_asked_once_a_second() -> None:
    simulate(nobody_tells, seeds=scaled(100, least=8))


def test_one_that_has_answered_since_is_asked_at_once() -> None:
    """It was too slow for one, and in time for another."""
    inquiry = SourcePacing()
    inquiry.failed(None, 1.0)
    assert inquiry.pause(1.0, 1.1) == pytest.approx(0.9)
    inquiry.answered(Topology(1, ()), 1.0, 1.1)
    assert inquiry.pause(1.0, 1.2) == 0.0


async def moves_late(sim: Sim) -> None:
    """The primary moves at any time after it has failed: it is found within about a second."""
    async with outage(sim) as day:
        [handler] = day.handlers
        await lost(handler)
        waiting = asyncio.ensure_future(call(handler, 30.0))
        await asyncio.sleep(sim.random(0, 6))
        day.world.version, day.world.primary = 2, ADDRESSES[1]
        moved_at = sim.now
        await waiting
        # A second, a fetch, a step of the dial, a connect and a call.
        assert sim.now - moved_at <= 1.0 + 0.02 + 0.25 + 0.1 + 0.3, sim.now - moved_at
        assert handler.address == ADDRESSES[1]


def test_a_primary_that_moves_during_an_outage_is_found_within_a_second() -> None:
    simulate(moves_late, seeds=scaled(200, least=20))


async def error_first(sim: Sim) -> None:
    """However young the connection is, the first failure asks at once."""
    async with outage(sim) as day:
        day.world.up[ADDRESSES[0]] = True
        fresh = ConnectionConfig.from_uri(f"http://fresh@{ADDRESSES[0]}")
        await asyncio.sleep(10.0)
        handler = await day.manager.get_or_create(fresh)
        await asyncio.sleep(sim.random(0, 1))
        day.world.version, day.world.primary = 2, ADDRESSES[1]
        day.world.fall(ADDRESSES[0])
        moved_at = sim.now
        await lost(handler)
        await call(handler, 30.0)
        # A call, a look at the connection or a call meanwhile, and the same as above.
        assert sim.now - moved_at <= 0.3 + 0.3 + 0.02 + 0.25 + 0.1 + 0.3
        assert (handler.address, handler.generation) == (ADDRESSES[1], 2)


def test_the_first_failure_asks_at_once() -> None:
    simulate(error_first, seeds=scaled(200, least=20))


async def moves_and_lives(sim: Sim) -> None:
    """Who was the primary lives, and answers UNAVAILABLE: one such answer is reason to ask."""
    async with outage(sim) as day:
        [handler] = day.handlers
        await lost(handler)
        day.world.up[ADDRESSES[0]] = True
        await call(handler, 30.0)
        await asyncio.sleep(sim.random(0, 6))
        day.world.busy[ADDRESSES[0]] = True
        day.world.version, day.world.primary = 2, ADDRESSES[1]
        await fails(handler, 3.0)
        failed_at = sim.now
        while handler.address != ADDRESSES[1]:
            await asyncio.sleep(0.01)
            # A look at the connection, the steps of the refresher and the source, and a connect.
            assert sim.now - failed_at <= 0.1 + 1.0 + 1.0 + 0.02 + 0.25 + 0.1, sim.now - failed_at
        await call(handler, 3.0)


def test_a_primary_that_moves_and_lives_is_left_within_seconds() -> None:
    simulate(moves_and_lives, seeds=scaled(200, least=20))


def does_not_ask(self: Follower) -> None:
    pass


async def news(sim: Sim) -> None:
    """What the refresher has just told is not asked for again."""
    async with outage(sim) as day:
        [handler] = day.handlers
        day.world.up[ADDRESSES[0]] = True
        await asyncio.sleep(30.0)
        day.directory.times.clear()
        day.world.version, day.world.primary = 2, ADDRESSES[1]
        [managed] = day.manager._table
        managed.strategy._refresher.trigger()
        await asyncio.sleep(1.5)
        assert handler.address == ADDRESSES[1]
        assert len(day.directory.times) == 1


def test_the_news_are_not_asked_for_again() -> None:
    simulate(news, seeds=scaled(100, least=8))


def asks_each_time(self: SourcePacing, pace: float, now: float) -> float:
    return 0.0


def never_pauses(self: SourcePacing, pace: float, now: float) -> float:
    return 0.0


def never_asks_twice(self: SourcePacing, pace: float, now: float) -> float:
    return max(0.0, self.answered_at + pace - now)


def does_not_know_the_news(self: TopologyMixin, in_use: str) -> Advice:
    return Advice.RECONNECT


@pytest.mark.parametrize(
    ("scenario", "owner", "name", "replacement"),
    [
        (long_outage, SourcePacing, "rest", asks_each_time),
        (nobody_tells, SourcePacing, "pause", never_pauses),
        (error_first, SourcePacing, "rest", never_asks_twice),
        (moves_and_lives, Follower, "hurry", does_not_ask),
        (news, TopologyMixin, "advise", does_not_know_the_news),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_too_many_and_too_few_questions_are_noticed(
    scenario: Any, owner: Any, name: str, replacement: Any
) -> None:
    planted = mutant(owner, name, replacement, name=replacement.__name__)
    assert_caught(scenario, planted, within=50, clean=3)
