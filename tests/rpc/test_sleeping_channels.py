"""Clients of a connection, and channels that sleep when no client holds them.

A channel that all clients have released sleeps after a while: its connection is closed, and a call
by a holder that did not release it opens another.
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

from moored.kernel import LoopThread
from moored.rpc import (
    AsyncRegularStrategy,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    ManagedConnection,
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
async def test_sleeping_channel_is_handed_out_again(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        await side.run(mine.close)
        await asleep(side)
        assert await side.get(config_of(echo), timeout=LIMIT) is mine
        assert side.manager.get_stats()["connections"][0]["client_count"] == 1
        assert mine.generation == 2


def test_channel_that_falls_asleep_during_its_checkout_can_be_called(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConnectionManager() as manager:
        channel = manager.get_or_create(config_of(echo), timeout=LIMIT)

        async def sweep(endpoint: ManagedConnection) -> None:
            endpoint.given_back(None, 0.0)
            endpoint.swept(0, 0.0, 0.0, 0.0)
            manager._background.tell(endpoint, endpoint.swept, 0, 0.0, 0.0)
            assert endpoint.resting

        def hand_out(endpoint: ManagedConnection, *_: object) -> bool:
            LoopThread.shared().run(sweep(endpoint), LIMIT)  # between the check and the return
            return True

        with monkeypatch.context() as patch:
            patch.setattr(ManagedConnection, "hand_out", hand_out)
            found = manager.get_or_create(config_of(echo), timeout=LIMIT)
        assert found is channel
        assert found.unary_unary(ECHO)(b"hi", timeout=LIMIT) == b"hi"


@both
async def test_sleeping_channel_waits_for_its_server(kind: Kind) -> None:
    async with kind(linger=0.2) as side:
        with EchoServer() as server:
            mine = await side.get(config_of(server), timeout=LIMIT)
            await side.run(mine.close)
            await asleep(side)
            server.kill()
            for _ in range(2):  # a failure is not final
                with pytest.raises(ConnectFailed):
                    await side.call(mine, ECHO, timeout=0.2)
            call = asyncio.create_task(side.call(mine, ECHO, b"hi"))
            await asyncio.sleep(0.5)  # longer than linger
            await asyncio.to_thread(server.start)
            assert await call == b"hi"


@both
async def test_sleeping_channel_is_closed_with_its_manager(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        own = await side.get(config_of(echo), dedicated=True, client=Client(), timeout=LIMIT)
        await side.run(mine.close)
        await asleep(side)
        assert await side.call(own, ECHO, b"hi") == b"hi", "a dedicated channel stays usable"
        await asleep(side)
        await side.run(side.manager.close_all)
        for channel in (mine, own):
            with pytest.raises(ManagerClosed, match="get_or_create"):
                await side.call(channel, ECHO)
        assert not side.manager.get_stats()["total_connections"]


@both
async def test_sleeping_channel_is_freed_with_its_last_reference(
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
async def test_released_dedicated_channel_cannot_be_woken(kind: Kind, echo: EchoServer) -> None:
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
        assert [each.handler for each in side.manager._table.asleep.values()] == [shared]
        assert await side.call(shared, ECHO, b"hi") == b"hi", (
            "a shared channel stays usable for other holders"
        )


@both
async def test_waking_at_the_same_address_is_not_a_move(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2, fetch_topology=lambda: [echo.uri]) as side:
        orders = ConnectionConfig.from_uri("http://orders.example.com")
        channel = await side.get(orders, timeout=LIMIT)
        await side.run(channel.close)
        await asleep(side)
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        assert channel.generation == 2
        assert side.manager.get_stats()["counters"]["moves"] == 0


@both
async def test_channel_whose_strategy_cannot_be_made_stays_asleep(
    kind: Kind, echo: EchoServer
) -> None:
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


async def test_waiting_for_ready_wakes_a_sleeping_channel(echo: EchoServer) -> None:
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


def test_many_threads_can_call_a_sleeping_channel(echo: EchoServer) -> None:
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


# -- identity of clients ------------------------------------------------------------


@dataclass(frozen=True)
class Equal:
    """Clients that compare equal."""

    name: str = "equal"


@dataclass
class Unhashable:
    """Clients that cannot be hashed."""

    name: str = "unhashable"


@both
@pytest.mark.parametrize("of", [Equal, Unhashable])
async def test_equal_client_objects_are_counted_separately(
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
        await asyncio.sleep(0.6)  # longer than linger
        assert channel.generation == 1, "the other client still holds it"


@both
@pytest.mark.parametrize("client", ["me", 7, {}, ()], ids=repr)
async def test_client_without_weak_references_is_refused(
    kind: Kind, client: object, echo: EchoServer
) -> None:
    async with kind() as side:
        for dedicated in (False, True):
            with pytest.raises(ConfigError, match=f"client=.* with {type(client).__name__}"):
                await side.get(config_of(echo), dedicated=dedicated, client=client, timeout=LIMIT)
        assert not side.manager.get_stats()["total_connections"], (
            "a connection was made for a refused client"
        )
        channel = await side.get(config_of(echo), timeout=LIMIT)
        with pytest.raises(ConfigError, match="client="):
            await side.get(config_of(echo), client=client, timeout=LIMIT)
        await side.run(side.manager.release, channel, client=client)
        assert side.manager.get_stats()["connections"][0]["client_count"] == 1


@both
async def test_garbage_collected_dedicated_channel_is_closed(kind: Kind, echo: EchoServer) -> None:
    async with kind(linger=0.2) as side:
        kept = await side.get(config_of(echo), dedicated=True)
        forgotten = weakref.ref(await side.get(config_of(echo), dedicated=True))
        assert side.manager.get_stats()["dedicated_connections"] == 2
        async with asyncio.timeout(LIMIT):
            while side.manager.get_stats()["total_connections"] or forgotten() is not None:
                gc.collect()
                await asyncio.sleep(0.02)
        assert await side.call(kept, ECHO, b"a") == b"a", "a kept channel was closed"
