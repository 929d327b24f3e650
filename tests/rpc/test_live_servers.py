"""A live server that answers UNAVAILABLE: other calls on the channel are not affected."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConnectionConfig, Member
from moored.rpc._dial import make_aio_channel

from .handlers import COLLECT, ECHO, ENDLESS, FAIL, SLEEP
from .servers import EchoServer
from .sides import LIMIT, Aio, Kind, Threads, both, config_of

pytestmark = pytest.mark.every_loop

CHAT = "/test.Echo/Chat"
#: The grace of calls of a replaced generation: short, for these tests.
GRACE = 0.2
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Reader:
    """Reads an endless stream of either kind of channel."""

    def __init__(self, side: Threads | Aio, channel: Any, method: str = ENDLESS) -> None:
        self._side = side
        self._call = channel.unary_stream(method)(b"0.05")

    async def read(self) -> bytes:
        if isinstance(self._side, Aio):
            return bytes(await self._call.read())
        return bytes(await self._side.run(next, self._call))

    async def read_all(self) -> None:
        while True:
            await self.read()

    def cancel(self) -> None:
        self._call.cancel()


async def fail(side: Threads | Aio, channel: Any, code: str = "UNAVAILABLE") -> None:
    with pytest.raises(grpc.RpcError) as raised:
        await side.call(channel, FAIL, code.encode())
    assert raised.value.code().name == code


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)


async def counted(side: Threads | Aio, name: str, number: int) -> None:
    await until(lambda: bool(side.manager.get_stats()["counters"][name] >= number))


@both
async def test_unavailable_from_a_live_server_ends_no_other_stream(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(grace=GRACE) as side:
        channel = await side.get(config_of(echo))
        reader = Reader(side, channel)
        assert await reader.read() == b"0"
        await fail(side, channel)
        await counted(side, "unavailable_answers", 1)
        for each in range(1, 10):  # for more than the grace
            assert await reader.read() == str(each).encode()
        assert channel.generation == 1
        assert side.manager.get_stats()["counters"]["recoveries"] == 0
        reader.cancel()


@both
async def test_calls_to_a_healthy_service_continue_beside_an_unavailable_one(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo))

        async def call_the_unavailable_one() -> None:
            while True:
                await fail(side, channel)

        dead = asyncio.create_task(call_the_unavailable_one())
        for _ in range(100):
            assert await side.call(channel, ECHO, b"a") == b"a"
        dead.cancel()
        counters = side.manager.get_stats()["counters"]
        assert (channel.generation, counters["calls_waited"]) == (1, 0)


@both
async def test_lost_connection_is_replaced(kind: Kind) -> None:
    with EchoServer() as server:
        async with kind() as side:
            channel = await side.get(config_of(server))
            slow = asyncio.create_task(side.call(channel, SLEEP, b"30"))
            await until(lambda: bool(channel.calls))
            server.kill()
            with pytest.raises(grpc.RpcError):
                await slow
            await counted(side, "recoveries", 1)
            server.start()
            assert await side.call(channel, ECHO, b"a") == b"a"
            assert channel.generation == 2


@both
async def test_stream_of_a_renewed_channel_is_not_cut(kind: Kind, echo: EchoServer) -> None:
    async with kind(grace=GRACE, max_age=0.2) as side:
        channel = await side.get(config_of(echo))
        reader = Reader(side, channel)
        await counted(side, "renewals", 1)
        for each in range(12):
            assert await reader.read() == str(each).encode()
        reader.cancel()


async def moved(side: Threads | Aio, channel: Any, members: list[Member], away: str) -> None:
    """Move the primary to another address."""
    members[:] = [Member("other", away)]
    (managed,) = side.manager._table
    managed.strategy.hurry()
    await until(lambda: bool(channel.generation > 1))


@both
async def test_stream_to_a_former_primary_is_cut_with_unavailable(
    kind: Kind, echo: EchoServer
) -> None:
    members = [Member("one", echo.uri)]
    with EchoServer() as other:
        async with kind(grace=GRACE, fetch_topology=lambda: list(members)) as side:
            channel = await side.get(config_of(echo))
            reader = Reader(side, channel)
            await reader.read()
            await moved(side, channel, members, other.uri)
            with pytest.raises(grpc.RpcError) as raised:
                await reader.read_all()
            assert raised.value.code() is UNAVAILABLE
            assert "replaced" in str(raised.value.details())


async def _read(channel: Any) -> None:
    async for _ in channel.unary_stream(ENDLESS)(b"0.05"):
        pass


async def _requests() -> Any:
    yield b"a"
    await asyncio.Event().wait()


async def _chat(channel: Any) -> None:
    async for _ in channel.stream_stream(CHAT)(_requests()):
        pass


async def _collect(channel: Any) -> None:
    await channel.stream_unary(COLLECT)(_requests())


async def _sleep(channel: Any) -> None:
    await channel.unary_unary(SLEEP)(b"5")


async def _ask_for_the_code(channel: Any) -> None:
    call = channel.unary_stream(ENDLESS)(b"30")
    code = await call.code()
    raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata())


async def _is_cut(side: Aio, echo: EchoServer, members: list[Member], use: Any) -> bool:
    """Return whether a call ends with UNAVAILABLE after the primary has moved."""
    channel = await side.get(config_of(echo))
    with EchoServer() as other:
        using = asyncio.create_task(use(channel))
        await until(lambda: bool(channel.calls))
        await moved(side, channel, members, other.uri)
        with pytest.raises(grpc.RpcError) as raised:
            await using
    return raised.value.code() is UNAVAILABLE


@pytest.mark.parametrize(
    ("use", "lanes"),
    [(_read, 1), (_read, 2), (_chat, 1), (_collect, 1), (_sleep, 1), (_ask_for_the_code, 1)],
)
async def test_cut_call_ends_with_an_error_and_not_as_cancelled(
    echo: EchoServer, use: Any, lanes: int
) -> None:
    """A CancelledError would end a task of a task group without an error."""
    members = [Member("one", echo.uri)]
    async with Aio(grace=GRACE, fetch_topology=lambda: members, channels=lanes) as side:
        assert await _is_cut(side, echo, members, use)


class Awaiting(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Awaits the answer, as Milvus's interceptor does."""

    async def intercept_unary_unary(self, proceed: Any, details: Any, request: Any) -> Any:
        call = await proceed(details, request)
        await call
        return call


async def _proceed(_: Any, proceed: Any, details: Any, request: Any) -> Any:
    return await proceed(details, request)


class Reading(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    intercept_unary_stream = _proceed


class Writing(grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[misc]
    intercept_stream_unary = _proceed


class Chatting(grpc.aio.StreamStreamClientInterceptor):  # type: ignore[misc]
    intercept_stream_stream = _proceed


@pytest.mark.parametrize("use", [_read, _chat, _collect, _sleep])
async def test_cut_call_under_a_channel_interceptor_ends_with_unavailable(
    echo: EchoServer, use: Any
) -> None:
    """gRPC knows only the outer call, which it cancels when the channel is closed."""
    members, numbers = [Member("one", echo.uri)], itertools.count(1_000_000)

    def make(config: ConnectionConfig) -> grpc.aio.Channel:
        interceptors = [Awaiting(), Reading(), Writing(), Chatting()]
        return make_aio_channel(config, next(numbers), interceptors=interceptors)

    options = {"fetch_topology": lambda: members, "handler_factory": make}
    async with Aio(grace=GRACE, **options) as side:
        assert await _is_cut(side, echo, members, use)


@both
async def test_stream_cut_by_closing_the_manager_ends_with_unavailable(
    kind: Kind, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.rpc._endpoint.CLOSING", GRACE)
    side = kind()
    channel = await side.get(config_of(echo))
    reader = Reader(side, channel)
    await reader.read()
    closing = asyncio.create_task(side.run(side.manager.close))
    with pytest.raises(grpc.RpcError) as raised:
        await reader.read_all()
    assert raised.value.code() is UNAVAILABLE
    await closing


@both
async def test_stream_cancelled_by_its_reader_is_cancelled(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        channel = await side.get(config_of(echo))
        reader = Reader(side, channel)
        await reader.read()
        reader.cancel()
        if kind is Aio:
            with pytest.raises(asyncio.CancelledError):
                await reader.read()
        else:
            with pytest.raises(grpc.RpcError) as raised:
                await reader.read()
            assert raised.value.code() is grpc.StatusCode.CANCELLED
