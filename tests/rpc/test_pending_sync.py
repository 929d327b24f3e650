"""Futures and streams of threads without a connection return immediately, and wait inside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.kernel import LoopThread
from moored.rpc import ConfigError, ConnectFailed, ConnectionManager, Handler, ManagerClosed

from .handlers import CHAT, COLLECT, COUNT, ECHO, eventually, loss_noticed
from .harness import Harness
from .servers import EchoServer
from .sides import LIMIT, config_of

#: Liveness: far less than the timeouts of the calls, far more than a call may take to return.
AT_ONCE = 10.0
LONG = 30.0
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.fixture
def harness() -> Iterator[Harness]:
    """A manager whose handler has no connection."""
    with Harness() as harness:
        yield harness


@pytest.fixture
def waiting(harness: Harness) -> Handler:
    return harness.handler


def begin(handler: Handler, kind: str, timeout: float | None = LONG) -> Any:
    match kind:
        case "unary future":
            return handler.unary_unary(ECHO).future(b"a", timeout)
        case "stream future":
            return handler.stream_unary(COLLECT).future(iter([b"a", b"b"]), timeout)
        case "unary stream":
            return handler.unary_stream(COUNT)(b"2", timeout)
        case _:
            return handler.stream_stream(CHAT)(iter([b"a"]), timeout)


FUTURES = {"unary future": b"a", "stream future": b"ab"}
STREAMS = {"unary stream": [b"0", b"1"], "stream stream": [b"re: a"]}
KINDS = [*FUTURES, *STREAMS]


@pytest.mark.parametrize("kind", KINDS)
def test_call_returns_immediately_and_begins_with_a_connection(
    kind: str, harness: Harness, echo: EchoServer
) -> None:
    waiting = harness.handler
    began = time.monotonic()
    call = begin(waiting, kind)
    assert time.monotonic() - began < AT_ONCE
    assert isinstance(call, (grpc.Call, grpc.Future))
    assert call.is_active()
    assert call.running()
    assert not call.done()
    assert not call.cancelled()
    assert LONG / 2 < call.time_remaining() <= LONG
    assert "waits" in repr(call)
    callbacks: list[Any] = []
    call.add_done_callback(callbacks.append)
    harness.swap(echo.uri)
    if kind in FUTURES:
        assert call.result(LIMIT) == FUTURES[kind]
        assert call.exception(LIMIT) is None
        assert call.traceback(LIMIT) is None
    else:
        assert list(call) == STREAMS[kind]
    assert call.code() is grpc.StatusCode.OK
    assert call.details() == ""
    assert call.debug_error_string() == ""
    assert (list(call.initial_metadata()), list(call.trailing_metadata())) == ([], [])
    eventually(lambda: callbacks == [call])
    assert call.done()
    eventually(lambda: waiting.calls == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_call_that_times_out_fails_in_the_future_or_at_the_first_read(
    kind: str, waiting: Handler
) -> None:
    call = begin(waiting, kind, 0.05)
    ended = threading.Event()
    assert call.add_callback(ended.set)
    with pytest.raises(ConnectFailed, match=r"not sent: waited .* for a connection") as raised:
        call.result() if kind in FUTURES else next(call)
    assert raised.value.code() is DEADLINE  # type: ignore[attr-defined]
    assert (call.code(), call.done(), call.cancelled()) == (DEADLINE, True, False)
    assert ended.wait(LIMIT)
    assert not call.add_callback(ended.set)
    assert waiting.gate.pending == []


def test_call_cancelled_before_it_begins_never_begins(harness: Harness, echo: EchoServer) -> None:
    waiting = harness.handler
    future, stream = begin(waiting, "unary future"), begin(waiting, "unary stream")
    assert future.cancel()
    assert stream.cancel()
    assert future.cancelled()
    with pytest.raises(grpc.FutureCancelledError):
        future.result()
    with pytest.raises(grpc.FutureCancelledError):
        future.exception()
    assert stream.code() is grpc.StatusCode.CANCELLED
    live = harness.swap(echo.uri)
    eventually(lambda: not waiting.gate.pending and not live.calls)


def test_cancelled_call_is_forgotten_immediately(waiting: Handler) -> None:
    begin(waiting, "unary future").cancel()
    assert waiting.gate.pending == []


def test_call_that_cannot_be_made_does_not_hold_up_the_others(
    harness: Harness, echo: EchoServer
) -> None:
    """Its error has no callbacks, and its own done callback raises."""

    def refuse(request: object) -> bytes:
        raise ValueError("cannot be serialized")

    waiting = harness.handler
    future = waiting.unary_unary(ECHO, request_serializer=refuse).future(b"", LONG)
    stream = waiting.unary_stream(COUNT, request_serializer=refuse)(b"", LONG)
    future.add_done_callback(lambda done: done.result())
    called = threading.Event()
    stream.add_callback(called.set)
    last = begin(waiting, "unary future")
    harness.swap(echo.uri)
    assert last.result(LIMIT) == b"a"
    for read in (future.result, stream.__next__):
        with pytest.raises(grpc.RpcError) as raised:
            read()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert (future.code(), stream.code()) == (grpc.StatusCode.INTERNAL,) * 2
    assert called.wait(LIMIT)


@pytest.mark.parametrize("expires", [True, False])
def test_callback_of_a_failed_call_may_wait_for_the_manager(
    harness: Harness, expires: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop thread, which fails the calls, must not wait for their callbacks."""
    loop, waited = LoopThread.shared(), threading.Event()
    timeout = 0.05 if expires else LONG
    calls = [begin(harness.handler, "unary future", timeout) for _ in range(2)]

    def wait(call: Any) -> None:
        loop.run(asyncio.sleep(0), LIMIT)
        waited.set()
        raise KeyError("the callback failed")

    for call in calls:
        call.add_done_callback(wait)

    if not expires:
        harness.feed(ConfigError("no such certificate"))
    for call in calls:
        assert isinstance(call.exception(LIMIT), ConnectFailed)
    assert waited.wait(LIMIT)
    eventually(lambda: "the callback failed" in caplog.text)


def test_waiting_for_a_future_can_time_out(waiting: Handler) -> None:
    call = begin(waiting, "unary future")
    for ask in (call.result, call.exception, call.traceback):
        with pytest.raises(grpc.FutureTimeoutError):
            ask(0.01)


def test_close_fails_waiting_calls(harness: Harness) -> None:
    call = begin(harness.handler, "unary future")
    harness.manager.close()
    with pytest.raises(grpc.RpcError, match="is closed"):
        call.result(LIMIT)
    with pytest.raises(ManagerClosed):
        begin(harness.handler, "unary future")


def test_permanent_error_fails_waiting_calls(harness: Harness) -> None:
    call = begin(harness.handler, "unary stream")
    harness.feed(ConfigError("no such certificate"))
    with pytest.raises(grpc.RpcError, match="no such certificate"):
        next(call)


def test_exception_of_credentials_is_raised_in_the_future(echo: EchoServer) -> None:
    class Broken:
        def metadata(self) -> tuple[tuple[str, str], ...]:
            raise KeyError("no token")

    with Harness(credentials=Broken()) as harness:
        call = begin(harness.handler, "unary future")
        live = harness.swap(echo.uri)
        with pytest.raises(KeyError, match="no token"):
            call.result(LIMIT)
        assert isinstance(call.exception(), KeyError)
        eventually(lambda: not live.calls)


def test_waiting_calls_are_counted_and_succeed_after_an_outage() -> None:
    with EchoServer() as server, ConnectionManager() as manager:
        channel = manager.get_or_create(config_of(server))
        server.kill()
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(ECHO)(b"", timeout=LIMIT)
        loss_noticed(channel)
        calls = [begin(channel, kind) for kind in KINDS]
        server.start()
        assert [call.result(LIMIT) for call in calls[:2]] == list(FUTURES.values())
        assert [list(call) for call in calls[2:]] == list(STREAMS.values())
        eventually(lambda: channel.endpoint.waiting == 0)
        assert manager.get_stats()["counters"]["calls_waited"] >= 4
