"""Retried calls: a real server is killed and restarted, and the caller's timeout is the limit."""

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

from moored.rpc import AsyncConnectionManager, ConfigError, ConnectionManager, Handler
from moored.rpc._dial import make_channel
from moored.rpc.calls._intercept_async import intercept_aio_channel
from moored.rpc.calls._retry import (
    AsyncRetryInterceptor,
    RetryInterceptor,
    retry_on_rpc_failure,
)

from .handlers import ECHO, FAIL, LIMIT
from .harness import AsyncHarness
from .servers import EchoServer
from .sides import config_of

UNAVAILABLE, ABORTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED


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
def manager() -> Iterator[ConnectionManager]:
    with ConnectionManager() as manager:
        yield manager


@pytest.fixture
async def aio() -> AsyncIterator[AsyncConnectionManager]:
    async with AsyncConnectionManager() as manager:
        yield manager


@pytest.fixture
def handler(manager: ConnectionManager, echo: EchoServer) -> Handler:
    return manager.get_or_create(config_of(echo))


class Reported:
    """A `classify` function that records the codes of failed calls; no error ends a connection."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    def __call__(self, error: Any) -> bool:
        self.codes.append(error.code())
        return False


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


def test_threads_that_call_during_an_outage_succeed(
    server: EchoServer, manager: ConnectionManager
) -> None:
    client = Client(manager.get_or_create(config_of(server)))
    with ThreadPoolExecutor(20) as pool:
        server.kill()
        answers = [pool.submit(client.echo, b"a", timeout=30) for _ in range(20)]
        # The outage lasts as long as the start of the new server.
        server.start()
        assert [each.result() for each in answers] == [b"a"] * 20
    assert manager.get_stats()["counters"]["connects"] == 2


async def test_tasks_that_call_during_an_outage_succeed(
    server: EchoServer, aio: AsyncConnectionManager
) -> None:
    client = AsyncClient(await aio.get_or_create(config_of(server)))
    server.kill()
    answers = [asyncio.create_task(client.echo(b"a", timeout=30)) for _ in range(20)]
    await asyncio.to_thread(server.start)
    assert await asyncio.gather(*answers) == [b"a"] * 20
    assert aio.get_stats()["counters"]["connects"] == 2


def test_interceptor_for_threads_retries_during_an_outage(
    server: EchoServer, manager: ConnectionManager
) -> None:
    handler = manager.get_or_create(config_of(server))
    ask = grpc.intercept_channel(handler, RetryInterceptor(handler)).unary_unary(ECHO)
    server.kill()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, b"a", timeout=30)
        server.start()
        assert answer.result() == b"a"
    assert ask.future(b"b").result(10) == b"b"


async def test_interceptor_for_asyncio_retries_during_an_outage(
    server: EchoServer, aio: AsyncConnectionManager
) -> None:
    handler = await aio.get_or_create(config_of(server))
    channel = intercept_aio_channel(handler, AsyncRetryInterceptor(handler))
    ask = channel.unary_unary(ECHO)
    server.kill()
    call = ask(b"a", timeout=30)
    assert isinstance(call, grpc.aio.UnaryUnaryCall)
    await asyncio.to_thread(server.start)
    assert await call == b"a"
    assert await call.code() is grpc.StatusCode.OK
    await channel.close()


# -- limits ------------------------------------------------------------


def test_timeout_ends_the_retries(server: EchoServer, manager: ConnectionManager) -> None:
    client = Client(manager.get_or_create(config_of(server)))
    server.kill()
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        client.echo(b"a", timeout=1.0)
    assert raised.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, UNAVAILABLE)
    assert 0.9 < time.monotonic() - began < 10


async def test_timeout_ends_the_retries_for_asyncio(
    server: EchoServer, aio: AsyncConnectionManager
) -> None:
    client = AsyncClient(await aio.get_or_create(config_of(server)))
    server.kill()
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await client.echo(b"a", timeout=1.0)
    assert 0.9 < time.monotonic() - began < 10


def test_failed_recovery_does_not_end_the_retries(server: EchoServer) -> None:
    # Each try fails immediately: there is no handler to wait for.
    with make_channel(config_of(server), 99) as channel, ThreadPoolExecutor(1) as pool:
        server.kill()

        @retry_on_rpc_failure
        def echo(timeout: float) -> Any:
            return channel.unary_unary(ECHO)(b"a", timeout=timeout)

        answer = pool.submit(echo, timeout=30.0)
        server.start()
        assert answer.result() == b"a"


def test_each_try_gets_the_remaining_time(handler: Handler) -> None:
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


class Timeouts(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Records the timeout of each try; the third one fails with an error that is not retried."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def intercept_unary_unary(self, go_on: Any, details: Any, request: Any) -> Any:
        self.given.append(details.timeout)
        return go_on(details, request if len(self.given) < 3 else b"UNKNOWN")

    def check(self) -> None:
        first, second, third = self.given
        assert 30.0 > first > second > third


class AsyncTimeouts(Timeouts, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(self, go_on: Any, details: Any, request: Any) -> Any:
        return await super().intercept_unary_unary(go_on, details, request)


def test_each_try_of_an_interceptor_gets_the_remaining_time(handler: Handler) -> None:
    retried = RetryInterceptor(handler, codes=[ABORTED])
    channel = grpc.intercept_channel(handler, retried, timeouts := Timeouts())
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(FAIL)(b"ABORTED", timeout=30.0)
    timeouts.check()


async def test_each_try_of_an_interceptor_for_asyncio_gets_the_remaining_time(
    echo: EchoServer, aio: AsyncConnectionManager
) -> None:
    handler = await aio.get_or_create(config_of(echo))
    retried = AsyncRetryInterceptor(handler, codes=[ABORTED])
    channel = intercept_aio_channel(handler, retried, timeouts := AsyncTimeouts())
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(FAIL)(b"ABORTED", timeout=30.0)
    timeouts.check()


def test_number_of_tries_is_limited_without_a_timeout(handler: Handler) -> None:
    client = Client(handler)
    with pytest.raises(grpc.RpcError) as raised:
        client.fail("UNAVAILABLE")
    assert raised.value.code() is UNAVAILABLE
    assert client.tries == 3


async def test_number_of_tries_is_limited_without_a_timeout_for_asyncio(echo: EchoServer) -> None:
    async with AsyncConnectionManager(classify=(reported := Reported())) as manager:
        handler = await manager.get_or_create(config_of(echo))
        client = AsyncClient(handler)
        with pytest.raises(grpc.aio.AioRpcError):
            await client.fail("UNAVAILABLE")
        assert client.tries == 3
        interceptor = AsyncRetryInterceptor(handler, codes=[ABORTED], retry_times=2)
        ask = intercept_aio_channel(handler, interceptor).unary_unary(FAIL)
        reported.codes.clear()
        assert await ask(b"ABORTED").code() is ABORTED
        assert reported.codes == [ABORTED] * 2
        assert await ask(b"UNAVAILABLE").code() is UNAVAILABLE
        assert reported.codes == [ABORTED] * 2 + [UNAVAILABLE], "an unlisted code was retried"


@pytest.mark.parametrize(
    "code", [code.name for code in grpc.StatusCode if code.name not in ("OK", "UNAVAILABLE")]
)
def test_codes_other_than_unavailable_are_not_retried(handler: Handler, code: str) -> None:
    client = Client(handler)
    with pytest.raises(grpc.RpcError) as raised:
        client.fail(code, timeout=30)
    assert raised.value.code().name == code
    assert client.tries == 1


def test_interceptor_retries_only_unavailable(echo: EchoServer) -> None:
    with ConnectionManager(classify=(reported := Reported())) as manager:
        handler = manager.get_or_create(config_of(echo))
        ask = grpc.intercept_channel(handler, RetryInterceptor(handler)).unary_unary(FAIL)
        with pytest.raises(grpc.RpcError):
            ask(b"UNKNOWN", timeout=30)
        assert reported.codes == [grpc.StatusCode.UNKNOWN]


async def test_interceptor_for_asyncio_retries_only_unavailable(echo: EchoServer) -> None:
    async with AsyncConnectionManager(classify=(reported := Reported())) as manager:
        handler = await manager.get_or_create(config_of(echo))
        ask = intercept_aio_channel(handler, AsyncRetryInterceptor(handler)).unary_unary(FAIL)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(b"UNKNOWN", timeout=30)
        assert reported.codes == [grpc.StatusCode.UNKNOWN]


def test_other_exceptions_are_not_retried() -> None:
    tries: list[None] = []

    @retry_on_rpc_failure
    def defect() -> None:
        tries.append(None)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        defect()
    assert len(tries) == 1


def test_new_connection_ends_the_pause(manager: ConnectionManager, handler: Handler) -> None:
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
        assert manager.renew(handler)
        assert answer.result(30) == b"a"
        assert time.monotonic() - began < 15


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

    async with AsyncHarness() as harness:
        handler = harness.handler
        await harness.swap(echo.uri)
        streams = Streams()
        channel = intercept_aio_channel(handler, Marked(b"1"), streams, Marked(b"2"))
        ask = channel.unary_unary(ECHO)
        assert await ask(b"a") == b"a12"
        await harness.swap(echo.uri)
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
