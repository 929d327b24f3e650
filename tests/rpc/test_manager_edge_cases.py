"""What users do that is easily forgotten: they close twice, have strict servers, long streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Clock
from moored.rpc import (
    AsyncConnectionManager,
    ChannelError,
    ConnectFailed,
    ConnectionConfig,
)
from moored.testing import FaultProxy

from .handlers import ECHO, ENDLESS, eventually
from .servers import EchoServer
from .sides import LIMIT, Aio, Client, Kind, Threads, both, config_of
from .test_failed_attempts import RefusingServer
from .test_leaks import Leaping


async def first(side: Threads | Aio, stream: Any) -> bytes:
    """The first message of a stream."""
    answer: bytes = await side.run(stream.read if isinstance(side, Aio) else stream.__next__)
    return answer


async def holds(condition: Callable[[], bool], limit: float) -> None:
    await asyncio.to_thread(eventually, condition, limit)


async def ended(side: Threads | Aio, stream: Any) -> grpc.StatusCode:
    """How it ends."""
    try:
        while True:
            await first(side, stream)
    except grpc.RpcError as error:
        return error.code()
    except asyncio.CancelledError:  # what grpc.aio raises when a channel is closed
        return await stream.code()


# -- a healthy connection is kept ------------------------------------------------------------------


@both
async def test_a_server_that_does_not_answer_strangers_is_well(kind: Kind) -> None:
    with EchoServer(token="secret", strict=True) as server:
        config = ConnectionConfig.from_uri(server.uri, token="secret")
        async with kind(idle=0.1) as side:
            channel = await side.get(config, timeout=LIMIT)
            for _ in range(2):
                await asyncio.sleep(0.2)  # idle for longer than that
                assert await side.get(config, timeout=LIMIT) is channel
            assert channel.generation == 1
            assert side.manager.get_stats()["counters"]["probes_healthy"] == 2
            assert await side.call(channel, ECHO, b"hi") == b"hi"


# -- giving it back --------------------------------------------------------------------------------


@both
async def test_who_closes_too_often_takes_nothing_from_one_who_calls(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(linger=1.0) as side:
        mine = await side.get(config_of(echo), timeout=LIMIT)
        client = Client()
        theirs = await side.get(config_of(echo), client=client, timeout=LIMIT)
        await side.run(theirs.close)
        await side.run(theirs.close)
        del client
        assert side.manager.get_stats()["connections"][0]["client_count"] == 0
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            assert await side.call(mine, ECHO, b"still here") == b"still here"
            await asyncio.sleep(0.1)
        # And it does go, when nobody calls any more; but who holds it may well do so again.
        await holds(lambda: not side.manager.get_stats()["total_connections"], LIMIT)
        assert "asleep" in repr(mine)
        assert await side.call(mine, ECHO, b"and here") == b"and here"
        assert side.manager.get_stats()["connections"][0]["generation"] == 2


# -- errors of one's own ---------------------------------------------------------------------------


class NotTheLeader(Exception):
    """What a service says, in an answer of its own."""


@both
@pytest.mark.parametrize("dated", [True, False])
async def test_late_errors_of_an_application_change_nothing(
    kind: Kind, dated: bool, echo: EchoServer
) -> None:
    clock = Leaping()
    async with kind(classify=lambda e: isinstance(e, NotTheLeader), clock=clock) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)

        async def tell(generation: int) -> None:
            named = {"generation": generation} if dated else {}
            handle = side.manager.handle_error
            assert await side.run(handle, channel, NotTheLeader(), LIMIT, **named)

        for _ in range(20):
            await tell(1)
        assert channel.generation == 2, "one of them was enough"
        if dated:
            clock.leap()  # it is proven, and what is said of the first one is still old
            await tell(1)
            assert channel.generation == 2
            await tell(2)
        else:
            await tell(2)
            assert channel.generation == 2, "it may well be late"
            clock.leap()
            await tell(2)
        assert channel.generation == 3


# -- the clock that it is given --------------------------------------------------------------------


@both
async def test_idle_is_what_the_clock_says(kind: Kind, echo: EchoServer) -> None:
    clock = Leaping()
    async with kind(clock=clock) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        (managed,) = side.manager._table
        assert managed.created_at <= managed.last_used_at <= clock.monotonic()
        for _ in range(3):
            clock.ahead += 3600.0
            assert side.manager.get_stats()["connections"][0]["idle_time"] >= 3600.0
            assert await side.get(config_of(echo), timeout=LIMIT) is channel
        assert side.manager.get_stats()["counters"]["probes_healthy"] == 3
        clock.ahead += 3600.0
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        assert side.manager.get_stats()["connections"][0]["idle_time"] < 3600.0


@both
async def test_how_long_nobody_had_it_is_what_the_clock_says(kind: Kind, echo: EchoServer) -> None:
    frozen = time.monotonic() + 1e6
    now = [frozen]
    async with kind(clock=Clock(lambda: now[0]), linger=0.2) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        await side.run(channel.close)
        await asyncio.sleep(0.6)
        assert side.manager.get_stats()["total_connections"] == 1, "no time has passed"
        now[0] += 1.0
        await holds(lambda: not side.manager.get_stats()["total_connections"], LIMIT)


@both
async def test_many_connections_are_closed_in_the_time_of_one(
    kind: Kind, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._background.CLOSING", 1.0)
    async with kind() as side:
        channels = [
            await side.get(config_of(echo), dedicated=True, timeout=LIMIT) for _ in range(6)
        ]
        streams = [each.unary_stream(ENDLESS)(b"0.05") for each in channels]
        for stream in streams:
            assert await first(side, stream) == b"0"
        began = time.monotonic()
        await side.run(side.manager.close)
        assert time.monotonic() - began < 3.0


# -- time ------------------------------------------------------------------------------------------


@both
async def test_no_time_is_no_time(kind: Kind) -> None:
    async with kind() as side:
        began = time.monotonic()
        with pytest.raises(ConnectFailed):
            await side.get(config_of(EchoServer()), timeout=0)
        assert time.monotonic() - began < 3.0


@both
async def test_a_call_that_waits_inside_its_channel_has_short_pauses(kind: Kind) -> None:
    async with kind() as side:
        with EchoServer() as server:
            channel = await side.get(config_of(server), timeout=LIMIT)
        async with Door(server.address) as door:
            method = channel.unary_unary(ECHO)
            begin = method if kind is Aio else method.future
            call = begin(b"", wait_for_ready=True, timeout=LIMIT)
            # gRPC's own pauses would have let it come four times or five.
            async with asyncio.timeout(9.0):
                while door.knocks < 8:
                    if call.done():  # it was begun before gRPC knew that the server has gone
                        call = begin(b"", wait_for_ready=True, timeout=LIMIT)
                    await asyncio.sleep(0.01)
            call.cancel()


async def test_a_peer_that_vanishes_without_a_word_is_noticed(echo: EchoServer) -> None:
    with FaultProxy("127.0.0.1", echo.port).in_thread() as proxy:
        config = ConnectionConfig.from_uri(
            f"http://127.0.0.1:{proxy.port}", channel_options={"grpc.keepalive_time_ms": 1000}
        )
        async with Threads() as threads, Aio() as aio:
            channels = [(side, await side.get(config, timeout=LIMIT)) for side in (threads, aio)]
            proxy.stall()
            began = time.monotonic()
            calls = [side.call(channel, ECHO, b"") for side, channel in channels]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, grpc.RpcError)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < 18.0  # 6, and thrice that
            proxy.heal()


# -- loops -----------------------------------------------------------------------------------------


async def test_a_manager_of_another_loop_says_so(echo: EchoServer) -> None:
    async with AsyncConnectionManager() as manager:
        config = config_of(echo)
        await manager.get_or_create(config, timeout=LIMIT)

        def elsewhere() -> None:
            asyncio.run(manager.get_or_create(config, timeout=LIMIT))

        with pytest.raises(ChannelError, match="another event loop"):
            await asyncio.to_thread(elsewhere)
