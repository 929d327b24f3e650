"""The handler for asyncio, over real servers; a call that had to wait behaves like any other."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncConnectionManager,
    AsyncHandler,
    ConnectFailed,
    ManagerClosed,
    TokenCredentials,
)
from moored.testing import scaled

from .handlers import (
    CHAT,
    COLLECT,
    COUNT,
    ECHO,
    ENDLESS,
    FAIL,
    LIMIT,
    METADATA,
    PID,
    SLEEP,
    descriptors,
    loss_noticed_async,
)
from .harness import AsyncHarness, FakeAioChannel
from .servers import EchoServer, make_stubs
from .sides import config_of

Make = Callable[..., Awaitable[AsyncHarness]]

CANCELLED = grpc.StatusCode.CANCELLED
OK = grpc.StatusCode.OK


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Harnesses that are closed at the end."""
    async with AsyncExitStack() as made:

        async def make(first: Any = None, **options: Any) -> AsyncHarness:
            harness = await made.enter_async_context(AsyncHarness(**options))
            if first is not None:
                await harness.swap(first)
            return harness

        yield make


@pytest.fixture
async def harness(make: Make, echo: EchoServer) -> AsyncHarness:
    return await make(echo.uri)


@pytest.fixture(params=["connected", "connecting"])
async def each(request: pytest.FixtureRequest, make: Make, echo: EchoServer) -> AsyncHarness:
    """A harness that is connected, or connects when the first call has begun."""
    if request.param == "connected":
        return await make(echo.uri)
    harness = await make()
    harness.feed(echo.uri)
    return harness


@pytest.fixture
async def either(each: AsyncHarness) -> AsyncHandler:
    return each.handler


# -- it is a channel -------------------------------------------------------------------------------


async def test_unary_call_has_the_interface_of_grpc(either: AsyncHandler) -> None:
    assert isinstance(either, grpc.aio.Channel)
    ended: list[Any] = []
    call = either.unary_unary(METADATA)(b"", timeout=30, metadata=(("mine", "1"),))
    assert isinstance(call, grpc.aio.UnaryUnaryCall)
    call.add_done_callback(ended.append)
    assert not call.done()
    assert 0 < call.time_remaining() <= 30
    assert ["mine", "1"] in json.loads(await call)
    assert await call == await call
    assert call.done()
    assert not call.cancelled()
    assert not call.cancel()
    assert (await call.code(), await call.details()) == (OK, "")
    assert await call.debug_error_string() == ""
    assert (await call.initial_metadata())["initial"] == "here"
    assert (await call.trailing_metadata())["trailing"] == "there"
    assert ended == [call]
    call.add_done_callback(ended.append)
    assert ended == [call, call]
    await call.wait_for_connection()


async def test_server_stream_can_be_iterated(either: AsyncHandler) -> None:
    call = either.unary_stream(COUNT)(b"3")
    assert isinstance(call, grpc.aio.UnaryStreamCall)
    assert [each async for each in call] == [b"0", b"1", b"2"]
    assert await call.code() is OK
    call = either.unary_stream(COUNT)(b"2")
    assert [await call.read() for _ in range(3)] == [b"0", b"1", grpc.aio.EOF]


async def test_server_stream_can_be_read(either: AsyncHandler) -> None:
    call = either.unary_stream(COUNT)(b"1")
    assert [await call.read() for _ in range(2)] == [b"0", grpc.aio.EOF]


async def test_client_stream_takes_an_iterator(either: AsyncHandler) -> None:
    call = either.stream_unary(COLLECT)(iter([b"a", b"b"]))
    assert isinstance(call, grpc.aio.StreamUnaryCall)
    assert await call == b"ab"


async def test_client_stream_can_be_written(either: AsyncHandler) -> None:
    call = either.stream_unary(COLLECT)()
    await call.write(b"a")
    await call.write(b"b")
    await call.done_writing()
    assert await call == b"ab"


async def test_bidirectional_stream_takes_an_iterator(either: AsyncHandler) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    call = either.stream_stream(CHAT)(requests())
    assert isinstance(call, grpc.aio.StreamStreamCall)
    assert [each async for each in call] == [b"re: a", b"re: b"]


async def test_bidirectional_stream_can_be_read_and_written(either: AsyncHandler) -> None:
    call = either.stream_stream(CHAT)()
    for word in (b"a", b"b"):
        await call.write(word)
        assert await call.read() == b"re: " + word
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is OK


async def test_failed_call_is_raised_and_reported(each: AsyncHarness) -> None:
    handler, code = each.handler, grpc.StatusCode.ABORTED
    call = handler.unary_unary(FAIL)(b"ABORTED")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is code
    assert (await call.code(), await call.details()) == (code, "as asked")
    ((error, generation),) = each.reported
    assert (error.code(), error.details(), generation) == (code, "as asked", 1)
    with pytest.raises(grpc.aio.AioRpcError):
        assert [number async for number in handler.unary_stream(COUNT)(b"2 ABORTED")]
    assert len(each.reported) == 2
    assert handler.calls == 0


async def test_cancelled_call_is_not_reported_as_an_error(each: AsyncHarness) -> None:
    ended: list[Any] = []
    call = each.handler.unary_unary(SLEEP)(b"60")
    call.add_done_callback(ended.append)
    assert call.cancel()
    assert not call.cancel()
    assert call.cancelled()
    assert call.done()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await call.code() is CANCELLED
    assert "cancelled" in await call.details()
    assert ended == [call]
    assert each.reported == []


async def test_cancelling_the_awaiting_task_cancels_the_call(either: AsyncHandler) -> None:
    call = either.unary_unary(SLEEP)(b"60")

    async def wait() -> None:
        await call

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled()
    assert await call.code() is CANCELLED


async def test_cancelling_a_wait_for_the_code_does_not_cancel_the_call(
    either: AsyncHandler,
) -> None:
    call = either.unary_unary(SLEEP)(b"0.2")
    task = asyncio.create_task(call.code())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await call == b"0.2"


async def test_stream_can_be_cancelled(either: AsyncHandler) -> None:
    call = either.unary_stream(ENDLESS)(b"0.01")
    assert await call.read() == b"0"
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    assert await call.code() is CANCELLED
    assert either.calls == 0


async def test_generated_stubs_accept_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_stubs(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    messages = importlib.import_module("greeter_pb2")
    services = importlib.import_module("greeter_pb2_grpc")
    with EchoServer(stubs=folder) as server:
        harness = await make()
        stub = services.GreeterStub(harness.handler)
        for _ in range(2):
            waiting = stub.Greet(messages.Name(name="you"), timeout=10)
            await harness.swap(server.uri)
            assert (await waiting).text == "hello you"
            texts = [each.text async for each in stub.GreetMany(messages.Name(name="you"))]
            assert texts == ["hello you 0", "hello you 1", "hello you 2"]
            harness.lose()
    for name in ("greeter_pb2", "greeter_pb2_grpc"):
        sys.modules.pop(name)


async def test_state_changes_are_reported(make: Make, echo: EchoServer) -> None:
    harness, states = await make(), grpc.ChannelConnectivity
    handler = harness.handler
    assert handler.get_state() is states.IDLE
    assert handler.get_state(try_to_connect=True) is states.CONNECTING
    change = asyncio.create_task(handler.wait_for_state_change(states.CONNECTING))
    waiting = asyncio.create_task(handler.channel_ready())
    await harness.swap(echo.uri)
    await asyncio.wait_for(change, 10)
    await asyncio.wait_for(waiting, 10)
    assert handler.get_state() is states.READY
    change = asyncio.create_task(handler.wait_for_state_change(states.READY))
    await asyncio.sleep(0)
    await harness.swap(echo.uri)
    assert not change.done()
    await harness.manager.close()
    await asyncio.wait_for(change, 10)
    assert handler.get_state() is states.SHUTDOWN
    with pytest.raises(ManagerClosed):
        await handler.channel_ready()


# -- metadata --------------------------------------------------------------------------------------


async def test_credentials_are_added_to_each_call(make: Make, echo: EchoServer) -> None:
    token = TokenCredentials("first")
    ask = (await make(echo.uri, credentials=token)).handler.unary_unary(METADATA)
    assert ["authorization", "first"] in json.loads(await ask(b""))
    token.replace("second")
    both = json.loads(await ask(b"", metadata=grpc.aio.Metadata(("mine", "1"))))
    assert ["authorization", "second"] in both
    assert ["mine", "1"] in both


async def test_async_credentials_are_awaited_within_the_timeout(
    make: Make, echo: EchoServer
) -> None:
    class Awaited:
        delay = 0.0

        async def metadata(self) -> tuple[tuple[str, str], ...]:
            await asyncio.sleep(self.delay)
            return (("authorization", "fresh"),)

    awaited = Awaited()
    ask = (await make(echo.uri, credentials=awaited)).handler.unary_unary(METADATA)
    assert ["authorization", "fresh"] in json.loads(await ask(b""))
    awaited.delay = 60.0
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(b"", timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# -- waiting for a generation ----------------------------------------------------------------------


async def test_call_gets_the_remaining_time_after_its_wait(make: Make, echo: EchoServer) -> None:
    harness = await make()
    call = harness.handler.unary_unary(LIMIT)(b"", timeout=10)
    await asyncio.sleep(1.0)
    assert harness.endpoint.waiting == 1
    await harness.swap(echo.uri)
    # gRPC rounds the timeout that it sends.
    assert 3 < float(await call) < 9.5
    assert harness.endpoint.waiting == 0


async def test_waiting_call_ends_with_its_timeout(make: Make) -> None:
    harness = await make(FakeAioChannel())
    harness.lose(ConnectFailed("refused"))
    ended: list[Any] = []
    call = harness.handler.unary_unary(ECHO)(b"", timeout=0.05)
    call.add_done_callback(ended.append)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(raised.value, ConnectFailed)
    assert "north:1" in await call.details()
    assert "refused" in await call.debug_error_string()
    assert "refused" in str(raised.value)
    assert len(await call.initial_metadata()) == len(await call.trailing_metadata()) == 0
    assert ended == [call]
    assert call.done()
    assert not call.cancelled()
    assert "failed" in repr(call)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.wait_for_connection()
    stream = harness.handler.stream_stream(CHAT)(timeout=0.05)
    with pytest.raises(ConnectFailed):
        await stream.write(b"")
    with pytest.raises(ConnectFailed):
        assert [each async for each in stream]
    assert harness.endpoint.waiting == 0


async def test_call_without_a_timeout_waits_for_the_connect_timeout(make: Make) -> None:
    call = (await make(connect_timeout=0.05)).handler.unary_unary(ECHO)(b"")
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_close_of_the_manager_fails_waiting_calls(make: Make) -> None:
    harness = await make()
    call = harness.handler.unary_unary(ECHO)(b"")
    await harness.manager.close()
    with pytest.raises(ManagerClosed):
        await call
    with pytest.raises(ManagerClosed):
        harness.handler.unary_unary(ECHO)(b"")


async def test_close_of_a_dedicated_channel_fails_its_waiting_calls() -> None:
    with EchoServer() as server:
        async with AsyncConnectionManager() as manager:
            channel = await manager.get_or_create(config_of(server), dedicated=True)
            server.kill()
            await loss_noticed_async(channel)
            call = channel.unary_unary(ECHO)(b"", timeout=30)
            await asyncio.sleep(0)
            assert channel.endpoint.waiting == 1
            await channel.close()
            with pytest.raises(ManagerClosed):
                await asyncio.wait_for(call, 10)
            assert manager.get_stats()["total_connections"] == 0


async def test_close_of_a_shared_handler_releases_it(echo: EchoServer) -> None:
    async with AsyncConnectionManager() as manager:
        for _ in range(2):
            handler = await manager.get_or_create(config_of(echo))
        async with handler:
            pass
        assert manager.get_stats()["connections"][0]["client_count"] == 1
        assert await handler.unary_unary(ECHO)(b"a") == b"a"


# -- swaps -----------------------------------------------------------------------------------------


async def test_calls_use_the_new_generation_after_a_swap(make: Make) -> None:
    with EchoServer() as one, EchoServer() as other:
        harness = await make(one.uri)
        handler, ask = harness.handler, harness.handler.unary_unary(PID)
        assert int(await ask(b"")) == one.pid
        await harness.swap(other.uri)
        assert int(await ask(b"")) == other.pid
        assert (handler.generation, handler.address) == (2, other.address)
        assert repr(handler) == f"<AsyncHandler to {other.address}: generation 2, 0 calls>"


async def test_replaced_generation_finishes_its_calls_and_is_closed(
    harness: AsyncHarness, echo: EchoServer
) -> None:
    handler, old = harness.handler, harness.live
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    assert await numbers.read() == b"0"
    call = handler.unary_unary(SLEEP)(b"0.3")
    await harness.swap(echo.uri)
    assert await numbers.read() == b"1"
    assert await call == b"0.3"
    assert ": retired, 1 calls" in repr(old)
    numbers.cancel()
    await harness.wait_closed()
    assert old.closed
    assert old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_calls_to_another_server_that_exceed_the_grace_are_cut(
    harness: AsyncHarness, echo: EchoServer
) -> None:
    call = harness.handler.unary_unary(SLEEP)(b"60")
    await harness.swap(echo.uri, "elsewhere:1")
    harness.leap(29.0)
    assert await harness.handler.unary_unary(ECHO)(b"a") == b"a"
    assert not call.done()
    harness.leap(1.0)
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.wait_for(call, 10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await harness.wait_closed()
    assert await harness.handler.unary_unary(ECHO)(b"a") == b"a"


async def test_garbage_collected_stream_keeps_its_generation_until_the_grace_ends(
    harness: AsyncHarness, echo: EchoServer
) -> None:
    # gRPC keeps a reference to an asyncio call until it ends.
    old = harness.live
    numbers = harness.handler.unary_stream(ENDLESS)(b"0.01")
    await numbers.read()
    await harness.swap(echo.uri, "elsewhere:1")
    del numbers
    gc.collect()
    harness.leap(30.0)
    await harness.wait_closed()
    assert old.calls == []


async def test_call_to_a_killed_server_fails_and_is_reported(make: Make) -> None:
    with EchoServer() as server:
        harness = await make(server.uri)
        call = harness.handler.unary_unary(SLEEP)(b"60")
        numbers = harness.handler.unary_stream(COUNT)(b"1")
        assert [each async for each in numbers] == [b"0"]
        server.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(call, 10)
        assert [error.code() for error, _ in harness.reported] == [grpc.StatusCode.UNAVAILABLE]


async def test_no_call_is_lost_while_tasks_call_and_generations_change(
    make: Make, echo: EchoServer
) -> None:
    harness, ended = await make(), asyncio.Event()
    handler = harness.handler

    async def work() -> int:
        ask, count, done = handler.unary_unary(ECHO), handler.unary_stream(COUNT), 0
        while not ended.is_set():
            assert await ask(b"a", timeout=30) == b"a"
            assert len([each async for each in count(b"2", timeout=30)]) == 2
            done += 1
        return done

    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work()) for _ in range(10)]
        for _ in range(scaled(40, least=10)):
            await harness.swap(echo.uri)
            await handler.unary_unary(ECHO)(b"")
            harness.lose()
        await harness.swap(echo.uri)
        ended.set()
    assert all(worker.result() > 0 for worker in workers)
    await harness.wait_closed()


@pytest.mark.soak
async def test_descriptors_threads_and_memory_stay_flat(
    harness: AsyncHarness, echo: EchoServer
) -> None:
    handler = harness.handler
    ask, count = handler.unary_unary(ECHO), handler.unary_stream(COUNT)

    async def cycle(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            numbers = count(b"3")
            assert await numbers.read() == b"0"
            await harness.swap(echo.uri)
            assert await ask(b"a") == b"a"
            assert await numbers.read() == b"1"
            harness.lose()
            waiting = ask(b"b")
            await harness.swap(echo.uri)
            assert await waiting == b"b"
            assert await numbers.read() == b"2"
            assert await numbers.read() is grpc.aio.EOF
        await harness.wait_closed()
        gc.collect()
        return descriptors(), threading.active_count(), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        files, threads, memory = await cycle(10)
        later_files, later_threads, later_memory = await cycle(100)
    finally:
        tracemalloc.stop()
    assert later_files <= files + 3
    assert later_threads <= threads
    assert later_memory <= memory + 200_000
