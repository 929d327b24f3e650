"""The handler for asyncio, over real servers; a call that had to wait behaves like any other."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc._dial import TokenCredentials
from moored.rpc._errors import ConnectFailed, ManagerClosed
from moored.rpc._handler_async import AsyncHandler
from moored.rpc._live_channel import LiveChannel
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
    new_aio_live,
    opened,
)
from .servers import EchoServer, make_stubs

Make = Callable[..., AsyncHandler]

CANCELLED = grpc.StatusCode.CANCELLED
OK = grpc.StatusCode.OK


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Handlers that are closed at the end."""
    made: list[AsyncHandler] = []

    def make(live: LiveChannel | None = None, **named: Any) -> AsyncHandler:
        callbacks = {name: named.pop(name) for name in [*named] if name.startswith("on_")}
        made.append(opened(AsyncHandler(**named), live, **callbacks))
        return made[-1]

    yield make
    for handler in made:
        handler._shut(0.0)
        await asyncio.wait_for(handler._wait_closed(), 10)
        assert handler.calls == 0


@pytest.fixture
async def handler(make: Make, echo: EchoServer) -> AsyncHandler:
    return make(await new_aio_live(echo.uri))


@pytest.fixture(params=["connected", "connecting"])
async def either(request: pytest.FixtureRequest, make: Make, echo: EchoServer) -> AsyncHandler:
    """A handler that has a generation, or gets one soon after the call has begun."""
    live = await new_aio_live(echo.uri)
    if request.param == "connected":
        return make(live)
    handler = make()
    asyncio.get_running_loop().call_later(0.05, handler._swap, live)
    return handler


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


async def test_failed_call_is_raised_and_reported(either: AsyncHandler) -> None:
    reported: list[tuple[grpc.StatusCode, str]] = []
    either._on_rpc_error = lambda error, number: reported.append((error.code(), error.details()))
    call = either.unary_unary(FAIL)(b"ABORTED")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert (await call.code(), await call.details()) == (grpc.StatusCode.ABORTED, "as asked")
    assert reported == [(grpc.StatusCode.ABORTED, "as asked")]
    with pytest.raises(grpc.aio.AioRpcError):
        assert [each async for each in either.unary_stream(COUNT)(b"2 ABORTED")]
    assert len(reported) == 2
    assert either.calls == 0


async def test_cancelled_call_is_not_reported_as_an_error(either: AsyncHandler) -> None:
    ended: list[Any] = []
    reported: list[int] = []
    either._on_rpc_error = lambda error, number: reported.append(number)
    call = either.unary_unary(SLEEP)(b"60")
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
    assert reported == []


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
        handler = make()
        stub = services.GreeterStub(handler)
        for _ in range(2):
            waiting = stub.Greet(messages.Name(name="you"), timeout=10)
            handler._swap(await new_aio_live(server.uri))
            assert (await waiting).text == "hello you"
            texts = [each.text async for each in stub.GreetMany(messages.Name(name="you"))]
            assert texts == ["hello you 0", "hello you 1", "hello you 2"]
            handler._lose()
    for name in ("greeter_pb2", "greeter_pb2_grpc"):
        sys.modules.pop(name)


async def test_state_changes_are_reported(make: Make, echo: EchoServer) -> None:
    handler = make()
    states = grpc.ChannelConnectivity
    assert handler.get_state() is states.CONNECTING
    change = asyncio.create_task(handler.wait_for_state_change(states.CONNECTING))
    waiting = asyncio.create_task(handler.channel_ready())
    handler._swap(await new_aio_live(echo.uri))
    await asyncio.wait_for(change, 10)
    await asyncio.wait_for(waiting, 10)
    assert handler.get_state() is states.READY
    change = asyncio.create_task(handler.wait_for_state_change(states.READY))
    await asyncio.sleep(0)
    handler._swap(await new_aio_live(echo.uri))
    assert not change.done()
    async with handler:
        pass
    await asyncio.wait_for(change, 10)
    assert handler.get_state() is states.SHUTDOWN
    with pytest.raises(ManagerClosed):
        await handler.channel_ready()


# -- metadata --------------------------------------------------------------------------------------


async def test_credentials_are_added_to_each_call(make: Make, echo: EchoServer) -> None:
    token = TokenCredentials("first")
    handler = make(await new_aio_live(echo.uri), credentials=token)
    ask = handler.unary_unary(METADATA)
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
    handler = make(await new_aio_live(echo.uri), credentials=awaited)
    ask = handler.unary_unary(METADATA)
    assert ["authorization", "fresh"] in json.loads(await ask(b""))
    awaited.delay = 60.0
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(b"", timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# -- waiting for a generation ----------------------------------------------------------------------


async def test_call_gets_the_remaining_time_after_its_wait(make: Make, echo: EchoServer) -> None:
    waits: list[int] = []
    handler = make(on_waiting=waits.append)
    call = handler.unary_unary(LIMIT)(b"", timeout=10)
    live = await new_aio_live(echo.uri)
    await asyncio.sleep(1.0)
    assert waits == [1]
    handler._swap(live)
    # gRPC rounds the timeout that it sends.
    assert 3 < float(await call) < 9.5
    assert waits == [1, -1]


async def test_waiting_call_ends_with_its_timeout(make: Make) -> None:
    handler = make(address="db:1")
    handler._lose(ConnectFailed("refused"))
    ended: list[Any] = []
    call = handler.unary_unary(ECHO)(b"", timeout=0.05)
    call.add_done_callback(ended.append)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(raised.value, ConnectFailed)
    assert "db:1" in await call.details()
    assert "refused" in await call.debug_error_string()
    assert "refused" in str(raised.value)
    assert len(await call.initial_metadata()) == len(await call.trailing_metadata()) == 0
    assert ended == [call]
    assert call.done()
    assert not call.cancelled()
    assert "failed" in repr(call)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.wait_for_connection()
    stream = handler.stream_stream(CHAT)(timeout=0.05)
    with pytest.raises(ConnectFailed):
        await stream.write(b"")
    with pytest.raises(ConnectFailed):
        assert [each async for each in stream]


async def test_call_without_a_timeout_waits_for_the_wait_limit(make: Make) -> None:
    call = make(wait_limit=0.05).unary_unary(ECHO)(b"")
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_close_fails_waiting_calls(make: Make) -> None:
    handler = make()
    call = handler.unary_unary(ECHO)(b"")
    await handler.close()
    with pytest.raises(ManagerClosed):
        await call
    with pytest.raises(ManagerClosed):
        handler.unary_unary(ECHO)(b"")


async def test_close_of_a_shared_handler_releases_it(make: Make, echo: EchoServer) -> None:
    released: list[None] = []

    async def release() -> None:
        released.append(None)

    handler = make(await new_aio_live(echo.uri), on_close=release)
    async with handler:
        pass
    assert released == [None]
    assert await handler.unary_unary(ECHO)(b"a") == b"a"


# -- swaps -----------------------------------------------------------------------------------------


async def test_calls_use_the_new_generation_after_a_swap(make: Make) -> None:
    with EchoServer() as one, EchoServer() as other:
        handler = make(await new_aio_live(one.uri, 1))
        ask = handler.unary_unary(PID)
        assert int(await ask(b"")) == one.pid
        handler._swap(await new_aio_live(other.uri, 2))
        assert int(await ask(b"")) == other.pid
        assert (handler.generation, handler.address) == (2, other.address)
        assert repr(handler) == f"<AsyncHandler to {other.address}: generation 2, 0 calls>"


async def test_replaced_generation_finishes_its_calls_and_is_closed(
    make: Make, echo: EchoServer
) -> None:
    old = await new_aio_live(echo.uri)
    handler = make(old)
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    assert await numbers.read() == b"0"
    call = handler.unary_unary(SLEEP)(b"0.3")
    handler._swap(await new_aio_live(echo.uri))
    assert await numbers.read() == b"1"
    assert await call == b"0.3"
    assert ": retired, 1 calls" in repr(old)
    numbers.cancel()
    await asyncio.wait_for(handler._wait_closed(), 10)
    assert old.closed
    assert old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def elsewhere(echo: EchoServer) -> LiveChannel:
    """Make a generation whose address is that of another server."""
    live = await new_aio_live(echo.uri)
    live.address = "elsewhere:1"
    return live


async def test_calls_to_another_server_that_exceed_the_grace_are_cut(
    make: Make, echo: EchoServer
) -> None:
    handler = make(await new_aio_live(echo.uri), grace=0.2)
    call = handler.unary_unary(SLEEP)(b"60")
    handler._swap(await elsewhere(echo))
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.wait_for(call, 10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(handler._wait_closed(), 10)
    assert await handler.unary_unary(ECHO)(b"a") == b"a"


async def test_garbage_collected_stream_keeps_its_generation_until_the_grace_ends(
    make: Make, echo: EchoServer
) -> None:
    # gRPC keeps a reference to an asyncio call until it ends.
    old = await new_aio_live(echo.uri)
    handler = make(old, grace=0.2)
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    await numbers.read()
    handler._swap(await elsewhere(echo))
    del numbers
    gc.collect()
    await asyncio.wait_for(handler._wait_closed(), 10)
    assert old.calls == []


async def test_call_to_a_killed_server_fails_and_is_reported(make: Make) -> None:
    reported: list[grpc.StatusCode] = []
    with EchoServer() as server:
        handler = make(
            await new_aio_live(server.uri),
            on_rpc_error=lambda error, number: reported.append(error.code()),
        )
        call = handler.unary_unary(SLEEP)(b"60")
        assert [each async for each in handler.unary_stream(COUNT)(b"1")] == [b"0"]
        server.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(call, 10)
        assert reported == [grpc.StatusCode.UNAVAILABLE]


async def test_no_call_is_lost_while_tasks_call_and_generations_change(
    make: Make, echo: EchoServer
) -> None:
    handler = make()
    ended = asyncio.Event()

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
            handler._swap(await new_aio_live(echo.uri))
            await handler.unary_unary(ECHO)(b"")
            handler._lose()
        handler._swap(await new_aio_live(echo.uri))
        ended.set()
    assert all(worker.result() > 0 for worker in workers)
    await asyncio.wait_for(handler._wait_closed(), 10)


@pytest.mark.soak
async def test_descriptors_threads_and_memory_stay_flat(make: Make, echo: EchoServer) -> None:
    handler = make(await new_aio_live(echo.uri))
    ask, count = handler.unary_unary(ECHO), handler.unary_stream(COUNT)

    async def cycle(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            numbers = count(b"3")
            assert await numbers.read() == b"0"
            handler._swap(await new_aio_live(echo.uri))
            assert await ask(b"a") == b"a"
            assert await numbers.read() == b"1"
            handler._lose()
            waiting = ask(b"b")
            handler._swap(await new_aio_live(echo.uri))
            assert await waiting == b"b"
            assert await numbers.read() == b"2"
            assert await numbers.read() is grpc.aio.EOF
        await asyncio.wait_for(handler._wait_closed(), 10)
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
