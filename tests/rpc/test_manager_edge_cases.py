"""Managers with strict servers, repeated closes, own clocks, zero timeouts and other loops."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import Clock
from moored.rpc import (
    AsyncConnectionManager,
    AsyncRegularStrategy,
    ChannelError,
    ConnectFailed,
    ConnectionConfig,
    RegularStrategy,
)
from moored.rpc._dial import make_aio_channel, make_channel
from moored.testing import FaultProxy

from .handlers import ECHO, ENDLESS, FAIL, eventually
from .servers import EchoServer
from .sides import LIMIT, Aio, Client, Kind, Threads, aborted, both, config_of
from .test_failed_attempts import RefusingServer
from .test_leaks import Leaping


async def first(side: Threads | Aio, stream: Any) -> bytes:
    """Return the next message of a stream."""
    answer: bytes = await side.run(stream.read if isinstance(side, Aio) else stream.__next__)
    return answer


async def holds(condition: Callable[[], bool], limit: float) -> None:
    await asyncio.to_thread(eventually, condition, limit)


async def ended(side: Threads | Aio, stream: Any) -> grpc.StatusCode:
    """Read a stream to its end, and return its code."""
    try:
        while True:
            await first(side, stream)
    except grpc.RpcError as error:
        return error.code()
    except asyncio.CancelledError:  # what grpc.aio raises when a channel is closed
        return await stream.code()


# -- a healthy connection is kept ------------------------------------------------------------------


@both
async def test_server_that_refuses_unauthenticated_probes_is_healthy(kind: Kind) -> None:
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


# -- release ------------------------------------------------------------


@both
async def test_surplus_closes_do_not_end_the_channel_of_another_caller(
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
        # It is closed when no call uses it; a holder may still call again.
        await holds(lambda: not side.manager.get_stats()["total_connections"], LIMIT)
        assert "asleep" in repr(mine)
        assert await side.call(mine, ECHO, b"and here") == b"and here"
        assert side.manager.get_stats()["connections"][0]["generation"] == 2


# -- an application's own errors ------------------------------------------------------------


class NotTheLeader(Exception):
    """An application's own error."""


@both
@pytest.mark.parametrize("dated", [True, False])
async def test_late_errors_of_an_application_change_nothing(
    kind: Kind, dated: bool, echo: EchoServer
) -> None:
    clock = Leaping()
    async with kind(classify=lambda e: isinstance(e, NotTheLeader), clock=clock) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)

        async def report(generation: int) -> None:
            named = {"generation": generation} if dated else {}
            handle = side.manager.handle_error
            assert await side.run(handle, channel, NotTheLeader(), LIMIT, **named)

        for _ in range(20):
            await report(1)
        assert channel.generation == 2, "errors of an old generation were accepted"
        if dated:
            clock.leap()  # the connection is proven; errors of generation 1 stay old
            await report(1)
            assert channel.generation == 2
            await report(2)
        else:
            await report(2)
            assert channel.generation == 2, "an undated error of a young connection was accepted"
            clock.leap()
            await report(2)
        assert channel.generation == 3


# -- an injected clock ------------------------------------------------------------


@both
async def test_age_and_idle_time_follow_the_injected_clock(kind: Kind, echo: EchoServer) -> None:
    clock = Leaping()
    async with kind(clock=clock) as side:
        began = clock.monotonic()
        channel = await side.get(config_of(echo), timeout=LIMIT)
        (managed,) = side.manager._table
        assert began <= managed.created_at <= managed.last_used_at <= clock.monotonic()
        for _ in range(3):
            clock.ahead += 3600.0
            assert side.manager.get_stats()["connections"][0]["idle_time"] >= 3600.0
            assert await side.get(config_of(echo), timeout=LIMIT) is channel
        assert side.manager.get_stats()["counters"]["probes_healthy"] == 3
        clock.ahead += 3600.0
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        (line,) = side.manager.get_stats()["connections"]
        assert line["idle_time"] < 3600.0
        assert 4 * 3600.0 <= line["age"] <= clock.monotonic() - began


@both
async def test_linger_follows_the_injected_clock(kind: Kind, echo: EchoServer) -> None:
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
async def test_many_connections_close_in_the_time_of_one(
    kind: Kind, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", 1.0)
    async with kind() as side:
        channels = [
            await side.get(config_of(echo), dedicated=True, timeout=LIMIT) for _ in range(12)
        ]
        streams = [each.unary_stream(ENDLESS)(b"0.05") for each in channels]
        for stream in streams:
            assert await first(side, stream) == b"0"
        began = time.monotonic()
        await side.run(side.manager.close)
        assert time.monotonic() - began < 9.0, "one after the other, they would take 12 s"


# -- time ------------------------------------------------------------------------------------------


@both
async def test_zero_timeout_fails_immediately(kind: Kind) -> None:
    async with kind() as side:
        began = time.monotonic()
        with pytest.raises(ConnectFailed):
            await side.get(config_of(EchoServer()), timeout=0)
        assert time.monotonic() - began < 10.0


@both
async def test_wait_for_ready_call_reconnects_with_short_pauses(kind: Kind) -> None:
    async with kind() as side:
        with EchoServer() as server:
            channel = await side.get(config_of(server), timeout=LIMIT)
        async with RefusingServer(server.address) as refusing:
            method = channel.unary_unary(ECHO)
            begin = method if kind is Aio else method.future
            call = begin(b"", wait_for_ready=True, timeout=LIMIT)
            # With gRPC's default backoff, it would be four or five connections.
            async with asyncio.timeout(9.0):
                while refusing.connections < 8:
                    if call.done():  # it began before gRPC had noticed the loss
                        call = begin(b"", wait_for_ready=True, timeout=LIMIT)
                    await asyncio.sleep(0.01)
            call.cancel()


async def test_silently_lost_peer_is_detected_by_keepalive(echo: EchoServer) -> None:
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


@both
async def test_strategy_cannot_keep_a_channel_that_was_dropped(
    kind: Kind, echo: EchoServer
) -> None:
    base: Any = RegularStrategy if kind is Threads else AsyncRegularStrategy

    class Keeping(base):  # type: ignore[misc]
        def on_unavailable(self, managed: Any) -> bool:
            return False

    clock = Leaping()
    async with kind(strategy=lambda config: Keeping(), clock=clock, classify=aborted) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        clock.leap()
        with pytest.raises(grpc.RpcError):
            await side.call(channel, FAIL, b"ABORTED")
        await holds(lambda: channel.generation == 2, LIMIT)
        assert await side.call(channel, ECHO, b"hello") == b"hello"


# -- callbacks that are cancelled --------------------------------------------------------------


@both
async def test_factory_that_raises_cancelled_error_is_called_again(
    kind: Kind, echo: EchoServer
) -> None:
    make, made = make_channel if kind is Threads else make_aio_channel, itertools.count()

    def factory(config: ConnectionConfig) -> Any:
        if (number := next(made)) == 0:
            raise asyncio.CancelledError  # as a token request does that another task cancels
        return make(config, 5000 + number)

    async with kind(handler_factory=factory) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        assert await side.call(channel, ECHO, b"hello") == b"hello"


@both
async def test_connection_whose_probe_raises_cancelled_error_is_replaced(
    kind: Kind, echo: EchoServer
) -> None:
    def probe(channel: Any) -> bool:
        raise asyncio.CancelledError

    clock = Leaping()
    async with kind(probe=probe, idle=1.0, clock=clock) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        clock.leap()
        assert await side.get(config_of(echo), timeout=LIMIT) is channel
        assert side.manager.get_stats()["counters"]["probes_unhealthy"] == 1


# -- loops -----------------------------------------------------------------------------------------


async def test_manager_of_another_loop_is_refused(echo: EchoServer) -> None:
    async with AsyncConnectionManager() as manager:
        config = config_of(echo)
        await manager.get_or_create(config, timeout=LIMIT)

        def elsewhere() -> None:
            asyncio.run(manager.get_or_create(config, timeout=LIMIT))

        with pytest.raises(ChannelError, match="another event loop"):
            await asyncio.to_thread(elsewhere)
