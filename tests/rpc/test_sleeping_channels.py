"""Whose connection it is: who has it, who has given it back, and who holds it all the same.

A channel that everybody seems to have given back is asleep after a while: its connection is closed,
and a call over it, by whoever still holds it, opens another.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncRegularStrategy,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    ManagerClosed,
    RegularStrategy,
)
from moored.testing import base_seed, scaled

from .handlers import ECHO, eventually
from .servers import EchoServer
from .sides import LIMIT, Aio, Client, Kind, Threads, both, config_of


async def holds(condition: Callable[[], bool], limit: float) -> None:
    await asyncio.to_thread(eventually, condition, limit)


async def asleep(side: Threads | Aio) -> None:
    await holds(lambda: not side.manager.get_stats()["total_connections"], LIMIT)


# -- asleep ----------------------------------------------------------------------------------------


@both
async def test_one_that_is_asleep_is_what_the_next_one_gets(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        await side.run(mine.close)
        await asleep(side)
        assert await side.get(config_of(echo), timeout=LIMIT) is mine
        assert side.manager.get_stats()["connections"][0]["client_count"] == 1
        assert mine.generation == 2


@both
async def test_one_that_is_asleep_can_wait_for_its_server(kind: Kind) -> None:
    async with kind(linger=0.2) as side:
        with EchoServer() as server:
            mine = await side.get(config_of(server), timeout=LIMIT)
            await side.run(mine.close)
            await asleep(side)
            server.kill()
            for _ in range(2):  # for good is nothing
                with pytest.raises(ConnectFailed):
                    await side.call(mine, ECHO, timeout=0.2)
            call = asyncio.create_task(side.call(mine, ECHO, b"hi"))
            await asyncio.sleep(0.5)  # longer than nobody may have it
            await asyncio.to_thread(server.start)
            assert await call == b"hi"


@both
async def test_one_that_is_asleep_ends_with_its_manager(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        own = await side.get(config_of(echo), dedicated=True, client=Client(), timeout=LIMIT)
        await side.run(mine.close)
        await asleep(side)
        assert await side.call(own, ECHO, b"hi") == b"hi", "it was called, and nobody else has it"
        await asleep(side)
        await side.run(side.manager.close_all)
        for channel in (mine, own):
            with pytest.raises(ManagerClosed, match="get_or_create"):
                await side.call(channel, ECHO)
        assert not side.manager.get_stats()["total_connections"]


@both
async def test_one_that_is_asleep_is_forgotten_with_who_holds_it(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(linger=0.2) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        await side.run(mine.close)
        await asleep(side)
        assert len(side.manager._table.asleep) == 1
        del mine

        def forgotten() -> bool:
            gc.collect()
            return not len(side.manager._table.asleep)

        await holds(forgotten, LIMIT)


@both
async def test_one_that_is_asleep_can_be_given_back_for_good(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        shared = await side.get(config_of(echo), timeout=LIMIT)
        own = await side.get(config_of(echo), dedicated=True, client=Client(), timeout=LIMIT)
        await side.run(shared.close)
        await asleep(side)
        for _ in range(2):
            await side.run(own.close)
            await side.run(shared.close)
        with pytest.raises(ManagerClosed, match="get_or_create"):
            await side.call(own, ECHO)
        assert list(side.manager._table.asleep.values()) == [shared]
        assert await side.call(shared, ECHO, b"hi") == b"hi", "others may hold it"


@both
async def test_to_wake_where_it_fell_asleep_is_not_to_move(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2, fetch_topology=lambda: [echo.uri]) as side:
        orders = ConnectionConfig.from_uri("http://orders.example.com")
        channel = await side.get(orders, timeout=LIMIT)
        await side.run(channel.close)
        await asleep(side)
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        assert channel.generation == 2
        assert side.manager.get_stats()["counters"]["moves"] == 0


@both
async def test_one_whose_strategy_cannot_be_made_stays_asleep(kind: Kind, echo: EchoServer) -> None:
    failures: list[Exception] = []

    def strategy(config: ConnectionConfig) -> Any:
        if failures:
            raise failures.pop()
        return AsyncRegularStrategy() if kind is Aio else RegularStrategy()

    async with kind(linger=0.2, strategy=strategy) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        await side.run(channel.close)
        await asleep(side)
        failures.append(OSError("nobody knows where it is"))
        with pytest.raises(ConnectFailed, match="nobody knows where it is"):
            await side.call(channel, ECHO)
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        await asleep(side)
        failures.append(OSError("nobody knows where it is"))
        with pytest.raises(OSError, match="nobody knows"):
            await side.get(config_of(echo), timeout=LIMIT)
        assert await side.get(config_of(echo), timeout=LIMIT) is channel


async def test_whoever_waits_for_it_to_be_ready_wakes_it(echo: EchoServer) -> None:
    async with Aio(linger=0.2) as aio, Threads(linger=0.2) as threads:
        for side in (aio, threads):
            channel = await side.get(config_of(echo), timeout=LIMIT)
            await side.run(channel.close)
            await asleep(side)
            if side is aio:
                assert channel.get_state() is grpc.ChannelConnectivity.IDLE
                await asyncio.wait_for(channel.channel_ready(), LIMIT)
            else:
                future = grpc.channel_ready_future(channel)
                await asyncio.to_thread(future.result, LIMIT)
            assert channel.generation == 2


def test_many_threads_that_never_have_it_and_call(echo: EchoServer) -> None:
    """It falls asleep and is woken up, all the time, by several at once, and no call fails."""
    seconds = scaled(15, least=2)
    failures: list[BaseException] = []
    with ConnectionManager(linger=0.02) as manager:
        channel = manager.get_or_create(config_of(echo), timeout=LIMIT)
        channel.close()
        over = time.monotonic() + seconds

        def work(number: int) -> None:
            chance = random.Random(f"{base_seed()} {number}")
            try:
                while time.monotonic() < over:
                    assert channel.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"
                    time.sleep(chance.choice([0.0, 0.001, 0.03, 0.2]))
                    if chance.random() < 0.2:
                        found = manager.get_or_create(config_of(echo), timeout=LIMIT)
                        assert found is channel, "there are two for one endpoint"
                        found.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + LIMIT)
        assert not failures, failures
        assert manager.get_stats()["counters"]["connects"] > 3, "it has never slept"
        works = manager._background
    eventually(lambda: not works._tasks and not works._timers and not works._closings)


# -- who is who ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equal:
    """One of these is as good as another."""

    name: str = "equal"


@dataclass
class Unhashable:
    """And of these none can be in a set."""

    name: str = "unhashable"


@both
@pytest.mark.parametrize("of", [Equal, Unhashable])
async def test_clients_that_are_equal_are_not_the_same(
    kind: Kind, of: type[object], echo: EchoServer
) -> None:
    async with kind(linger=0.2) as side:
        one, other = of(), of()
        channel = await side.get(config_of(echo), client=one, timeout=LIMIT)
        await side.get(config_of(echo), client=other, timeout=LIMIT)
        (managed,) = side.manager._table
        assert side.manager.get_stats()["connections"][0]["client_count"] == 2
        await side.run(side.manager.release, channel, client=one)
        await side.run(side.manager.release, channel, client=one)
        assert list(managed.clients) == [other]
        await asyncio.sleep(0.6)  # longer than nobody may have it
        assert channel.generation == 1, "the other one has it"


@both
@pytest.mark.parametrize("client", ["me", 7, {}, ()], ids=repr)
async def test_a_client_that_cannot_be_held_weakly(
    kind: Kind, client: object, echo: EchoServer
) -> None:
    async with kind() as side:
        for dedicated in (False, True):
            with pytest.raises(ConfigError, match=f"client=.* with {type(client).__name__}"):
                await side.get(config_of(echo), dedicated=dedicated, client=client, timeout=LIMIT)
        assert not side.manager.get_stats()["total_connections"], "it was made for nobody"
        channel = await side.get(config_of(echo), timeout=LIMIT)
        with pytest.raises(ConfigError, match="client="):
            await side.get(config_of(echo), client=client, timeout=LIMIT)
        await side.run(side.manager.release, channel, client=client)
        assert side.manager.get_stats()["connections"][0]["client_count"] == 1


@both
async def test_a_dedicated_channel_that_is_forgotten_without_a_client_is_closed(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(linger=0.2) as side:
        kept = await side.get(config_of(echo), dedicated=True)
        forgotten = weakref.ref(await side.get(config_of(echo), dedicated=True))
        assert side.manager.get_stats()["dedicated_connections"] == 2
        async with asyncio.timeout(LIMIT):
            while side.manager.get_stats()["total_connections"] or forgotten() is not None:
                gc.collect()
                await asyncio.sleep(0.02)
        assert await side.call(kept, ECHO, b"a") == b"a", "who still has one may call"
