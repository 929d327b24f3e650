"""Retried calls with a real server that is killed and restarted; the caller's timeout is the limit.

A small manager stands in for the real one: it dials after a reported failure, one at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest

from moored.rpc._config import ConnectionConfig
from moored.rpc._dial import close_channel, make_aio_channel, make_channel, ready
from moored.rpc._errors import ConfigError, ConnectFailed
from moored.rpc._handler import Handler
from moored.rpc._handler_async import AsyncHandler
from moored.rpc._live_channel import LiveChannel
from moored.rpc.calls._intercept_async import intercept_aio_channel
from moored.rpc.calls._retry import (
    AsyncRetryInterceptor,
    RetryInterceptor,
    retry_on_rpc_failure,
)

from .handlers import ECHO, FAIL, LIMIT, new_aio_live, new_live, opened
from .servers import EchoServer

UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED


class Recovery:
    """Dials a server again when a call has failed, on its own loop."""

    def __init__(self, uri: str, make: Any, handler: Any) -> None:
        self.handler = handler
        self.connects = 0
        self._config = ConnectionConfig.from_uri(uri)
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        handler._on_rpc_error = self._tell

    def _tell(self, error: grpc.RpcError, number: int) -> None:
        if error.code() is UNAVAILABLE:
            self._loop.call_soon_threadsafe(self._begin, error, number)

    def _begin(self, error: grpc.RpcError, number: int) -> None:
        if number == self.handler.generation:
            self.handler._lose(error)
            self._task = asyncio.create_task(self.dial(number + 1))

    async def dial(self, number: int) -> None:
        while True:
            channel = self._make(self._config, number)
            try:
                await ready(channel)
            except ConnectFailed:
                await close_channel(channel)
                await asyncio.sleep(0.05)
            else:
                self.connects += 1
                self.handler._swap(LiveChannel(number, channel, self._config.address))
                return

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@pytest.fixture
def server() -> Iterator[EchoServer]:
    """A server that tests may kill."""
    server = EchoServer()
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
async def recovery(server: EchoServer) -> AsyncIterator[Recovery]:
    """A recovery for calls of threads, on the loop of the test."""
    recovery = Recovery(server.uri, make_channel, Handler())
    await recovery.dial(1)
    yield recovery
    await recovery.close()
    recovery.handler._shut(0.0)
    assert await asyncio.to_thread(recovery.handler._wait_closed, 10)


@pytest.fixture
async def aio(server: EchoServer) -> AsyncIterator[Recovery]:
    recovery = Recovery(server.uri, make_aio_channel, AsyncHandler())
    await recovery.dial(1)
    yield recovery
    await recovery.close()
    recovery.handler._shut(0.0)
    await recovery.handler._wait_closed()


class Client:
    """A user's client."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.tries = 0

    @retry_on_rpc_failure
    def echo(self, request: bytes, timeout: float | None = None) -> Any:
        """Its docstring."""
        self.tries += 1
        return self.handler.unary_unary(ECHO)(request, timeout=timeout)

    @retry_on_rpc_failure(retry_times=3)
    def fail(self, code: str, timeout: float | None = None) -> Any:
        self.tries += 1
        return self.handler.unary_unary(FAIL)(code.encode(), timeout=timeout)


class AsyncClient:
    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.tries = 0

    @retry_on_rpc_failure
    async def echo(self, request: bytes, timeout: float | None = None) -> Any:
        self.tries += 1
        return await self._handler.unary_unary(ECHO)(request, timeout=timeout)

    @retry_on_rpc_failure(retry_times=3)
    async def fail(self, code: str, timeout: float | None = None) -> Any:
        self.tries += 1
        return await self._handler.unary_unary(FAIL)(code.encode(), timeout=timeout)


# -- an outage -------------------------------------------------------------------------------------


async def test_threads_that_call_during_an_outage_succeed(
    server: EchoServer, recovery: Recovery
) -> None:
    client = Client(recovery.handler)
    with ThreadPoolExecutor(20) as pool:
        server.kill()
        answers = [pool.submit(client.echo, b"a", timeout=30) for _ in range(20)]
        # The outage lasts as long as the start of the new server.
        await asyncio.to_thread(server.start)
        loop = asyncio.get_running_loop()
        got = await asyncio.gather(*(asyncio.wrap_future(each, loop=loop) for each in answers))
    assert got == [b"a"] * 20
    assert recovery.connects == 2


async def test_tasks_that_call_during_an_outage_succeed(server: EchoServer, aio: Recovery) -> None:
    client = AsyncClient(aio.handler)
    server.kill()
    answers = [asyncio.create_task(client.echo(b"a", timeout=30)) for _ in range(20)]
    await asyncio.to_thread(server.start)
    assert await asyncio.gather(*answers) == [b"a"] * 20
    assert aio.connects == 2


async def test_interceptor_for_threads_retries_during_an_outage(
    server: EchoServer, recovery: Recovery
) -> None:
    handler = recovery.handler
    ask = grpc.intercept_channel(handler, RetryInterceptor(handler)).unary_unary(ECHO)
    server.kill()
    answer = asyncio.create_task(asyncio.to_thread(ask, b"a", timeout=30))
    await asyncio.to_thread(server.start)
    assert await answer == b"a"
    assert await asyncio.to_thread(ask.future(b"b").result, 10) == b"b"


async def test_interceptor_for_asyncio_retries_during_an_outage(
    server: EchoServer, aio: Recovery
) -> None:
    channel = intercept_aio_channel(aio.handler, AsyncRetryInterceptor(aio.handler))
    ask = channel.unary_unary(ECHO)
    server.kill()
    call = ask(b"a", timeout=30)
    assert isinstance(call, grpc.aio.UnaryUnaryCall)
    await asyncio.to_thread(server.start)
    assert await call == b"a"
    assert await call.code() is grpc.StatusCode.OK
    await channel.close()


# -- limits ------------------------------------------------------------


async def test_timeout_ends_the_retries(
    server: EchoServer, recovery: Recovery, aio: Recovery
) -> None:
    server.kill()
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.to_thread(Client(recovery.handler).echo, b"a", timeout=1.0)
    took = time.monotonic() - began
    assert raised.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, UNAVAILABLE)
    assert 0.9 < took < 10
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await AsyncClient(aio.handler).echo(b"a", timeout=1.0)
    assert 0.9 < time.monotonic() - began < 10


async def test_failed_recovery_does_not_end_the_retries(
    server: EchoServer, recovery: Recovery
) -> None:
    # Each try fails immediately: there is no handler to wait for.
    channel = make_channel(ConnectionConfig.from_uri(server.uri), 99)
    server.kill()

    @retry_on_rpc_failure
    def echo(timeout: float) -> Any:
        return channel.unary_unary(ECHO)(b"a", timeout=timeout)

    answer = asyncio.create_task(asyncio.to_thread(echo, timeout=30.0))
    await asyncio.to_thread(server.start)
    assert await answer == b"a"
    await close_channel(channel)


def test_each_try_gets_the_remaining_time(echo: EchoServer) -> None:
    handler = opened(Handler(), new_live(echo.uri))
    given: list[float] = []

    @retry_on_rpc_failure(handler=handler, codes=[ABORTED], initial_backoff=0.05)
    def limit(timeout: float | None = None) -> float:
        assert timeout is not None
        given.append(timeout)
        left = float(handler.unary_unary(LIMIT)(b"", timeout=timeout))
        if len(given) < 3:
            handler.unary_unary(FAIL)(b"ABORTED", timeout=timeout)
        return left

    # gRPC rounds the timeout that it sends.
    assert limit(timeout=30.0) <= given[2] * 1.05
    assert given[0] > given[1] + 0.03 > given[2] + 0.06
    handler._shut(0.0)
    handler._wait_closed(10)


def test_number_of_tries_is_limited_without_a_timeout(echo: EchoServer) -> None:
    handler = opened(Handler(), new_live(echo.uri))
    client = Client(handler)
    with pytest.raises(grpc.RpcError) as raised:
        client.fail("UNAVAILABLE")
    assert raised.value.code() is UNAVAILABLE
    assert client.tries == 3
    handler._shut(0.0)
    handler._wait_closed(10)


async def test_number_of_tries_is_limited_without_a_timeout_for_asyncio(
    echo: EchoServer,
) -> None:
    async with opened(AsyncHandler(), await new_aio_live(echo.uri)) as handler:
        client = AsyncClient(handler)
        with pytest.raises(grpc.aio.AioRpcError):
            await client.fail("UNAVAILABLE")
        assert client.tries == 3
        interceptor = AsyncRetryInterceptor(handler, codes=[ABORTED], retry_times=2)
        ask = intercept_aio_channel(handler, interceptor).unary_unary(FAIL)
        reported: list[int] = []
        handler._on_rpc_error = lambda error, number: reported.append(number)
        assert await ask(b"ABORTED").code() is ABORTED
        assert len(reported) == 2
        assert await ask(b"UNAVAILABLE").code() is UNAVAILABLE
        assert len(reported) == 3, "a code that is not listed was retried"


@pytest.mark.parametrize(
    "code", [code.name for code in grpc.StatusCode if code.name not in ("OK", "UNAVAILABLE")]
)
def test_codes_other_than_unavailable_are_not_retried(echo: EchoServer, code: str) -> None:
    with opened(Handler(), new_live(echo.uri)) as handler:
        client = Client(handler)
        with pytest.raises(grpc.RpcError) as raised:
            client.fail(code, timeout=30)
        assert raised.value.code().name == code
        assert client.tries == 1


def test_interceptor_retries_only_unavailable(echo: EchoServer) -> None:
    reported: list[grpc.StatusCode] = []
    with opened(Handler(), new_live(echo.uri)) as handler:
        handler._on_rpc_error = lambda error, number: reported.append(error.code())
        ask = grpc.intercept_channel(handler, RetryInterceptor(handler)).unary_unary(FAIL)
        with pytest.raises(grpc.RpcError):
            ask(b"UNKNOWN", timeout=30)
        assert reported == [grpc.StatusCode.UNKNOWN]


async def test_interceptor_for_asyncio_retries_only_unavailable(echo: EchoServer) -> None:
    reported: list[grpc.StatusCode] = []
    async with opened(AsyncHandler(), await new_aio_live(echo.uri)) as handler:
        handler._on_rpc_error = lambda error, number: reported.append(error.code())
        ask = intercept_aio_channel(handler, AsyncRetryInterceptor(handler)).unary_unary(FAIL)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(b"UNKNOWN", timeout=30)
        assert reported == [grpc.StatusCode.UNKNOWN]


def test_other_exceptions_are_not_retried() -> None:
    tries: list[None] = []

    @retry_on_rpc_failure
    def defect() -> None:
        tries.append(None)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        defect()
    assert len(tries) == 1


def test_new_connection_ends_the_pause(echo: EchoServer) -> None:
    handler = opened(Handler(), new_live(echo.uri))
    failed = threading.Event()
    tries: list[None] = []

    @retry_on_rpc_failure(handler=handler, initial_backoff=60.0, max_backoff=60.0)
    def ask(timeout: float) -> Any:
        tries.append(None)
        if len(tries) > 1:
            return handler.unary_unary(ECHO)(b"a", timeout=timeout)
        failed.set()
        return handler.unary_unary(FAIL)(b"UNAVAILABLE", timeout=timeout)

    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        answer = pool.submit(ask, timeout=100.0)
        assert failed.wait(10)
        handler._swap(new_live(echo.uri))
        assert answer.result(30) == b"a"
        assert time.monotonic() - began < 15
    handler._shut(0.0)
    handler._wait_closed(10)


def test_decorated_function_keeps_its_name_and_docstring() -> None:
    assert Client.echo.__name__ == "echo"
    assert Client.echo.__doc__ == "Its docstring."
    with pytest.raises(ConfigError, match="retry_times"):
        retry_on_rpc_failure(retry_times=0)


# -- interceptors of asyncio in general ------------------------------------------------------------


async def test_interceptors_for_asyncio_are_applied_in_order(echo: EchoServer) -> None:
    class Marked(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        def __init__(self, mark: bytes) -> None:
            self.mark = mark

        async def intercept_unary_unary(self, go_on: Any, details: Any, request: Any) -> Any:
            return await go_on(details, request + self.mark)

    class Streams(
        grpc.aio.UnaryStreamClientInterceptor,  # type: ignore[misc]
        grpc.aio.StreamUnaryClientInterceptor,  # type: ignore[misc]
        grpc.aio.StreamStreamClientInterceptor,  # type: ignore[misc]
    ):
        seen = 0

        async def intercept_unary_stream(self, go_on: Any, details: Any, request: Any) -> Any:
            self.seen += 1
            return await go_on(details, request)

        intercept_stream_unary = intercept_stream_stream = intercept_unary_stream

    class Answers(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, go_on: Any, details: Any, request: Any) -> Any:
            return b"an answer"

    async with opened(AsyncHandler(), await new_aio_live(echo.uri)) as handler:
        streams = Streams()
        channel = intercept_aio_channel(handler, Marked(b"1"), streams, Marked(b"2"))
        ask = channel.unary_unary(ECHO)
        assert await ask(b"a") == b"a12"
        handler._swap(await new_aio_live(echo.uri))
        assert await ask(b"a", metadata=(("mine", "1"),)) == b"a12"
        numbers = channel.unary_stream("/test.Echo/Count")(b"2")
        assert [each async for each in numbers] == [b"0", b"1"]
        assert await channel.stream_unary("/test.Echo/Collect")(iter([b"a", b"b"])) == b"ab"
        chat = channel.stream_stream("/test.Echo/Chat")(iter([b"a"]))
        assert [each async for each in chat] == [b"re: a"]
        assert streams.seen == 3
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await channel.channel_ready()
        call = intercept_aio_channel(handler, Answers()).unary_unary(ECHO)(b"a")
        assert await call == b"an answer"
        assert await call.code() is grpc.StatusCode.OK
        assert call.done()
        assert intercept_aio_channel(handler) is handler
        with pytest.raises(ConfigError, match=r"is not a grpc\.aio\.ClientInterceptor"):
            intercept_aio_channel(handler, object())
