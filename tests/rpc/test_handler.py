"""The handler for threads, over real servers: it stays valid while connections are replaced."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    ConnectionStrategy,
    Handler,
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
    eventually,
    loss_noticed,
)
from .harness import FakeChannel, Harness
from .servers import EchoServer, make_stubs
from .sides import config_of

Make = Callable[..., Harness]


@pytest.fixture
def make() -> Iterator[Make]:
    """Harnesses that are closed at the end."""
    with ExitStack() as made:

        def make(first: Any = None, **options: Any) -> Harness:
            harness = made.enter_context(Harness(**options))
            if first is not None:
                harness.swap(first)
            return harness

        yield make


@pytest.fixture
def harness(make: Make, echo: EchoServer) -> Harness:
    return make(echo.uri)


@pytest.fixture
def handler(harness: Harness) -> Handler:
    return harness.handler


# -- it is a channel -------------------------------------------------------------------------------


def test_all_four_kinds_of_methods_work(handler: Handler) -> None:
    assert isinstance(handler, grpc.Channel)
    assert handler.unary_unary(ECHO)(b"a") == b"a"
    assert list(handler.unary_stream(COUNT)(b"3")) == [b"0", b"1", b"2"]
    assert handler.stream_unary(COLLECT)(iter([b"a", b"b"])) == b"ab"
    assert list(handler.stream_stream(CHAT)(iter([b"a", b"b"]))) == [b"re: a", b"re: b"]


def test_with_call_and_future_work(handler: Handler) -> None:
    response, call = handler.unary_unary(METADATA).with_call(b"", metadata=(("mine", "1"),))
    assert ["mine", "1"] in json.loads(response)
    assert ("initial", "here") in [tuple(pair) for pair in call.initial_metadata()]
    assert ("trailing", "there") in [tuple(pair) for pair in call.trailing_metadata()]
    assert handler.unary_unary(ECHO).future(b"a").result(10) == b"a"
    response, call = handler.stream_unary(COLLECT).with_call(iter([b"a"]))
    assert (response, call.code()) == (b"a", grpc.StatusCode.OK)
    assert handler.stream_unary(COLLECT).future(iter([b"a", b"b"])).result(10) == b"ab"
    eventually(lambda: handler.calls == 0)


def test_generated_stubs_accept_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_stubs(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    messages = importlib.import_module("greeter_pb2")
    services = importlib.import_module("greeter_pb2_grpc")
    with EchoServer(stubs=folder) as server:
        harness = make(server.uri)
        stub = services.GreeterStub(harness.handler)
        for _ in range(2):
            assert stub.Greet(messages.Name(name="you"), timeout=10).text == "hello you"
            texts = [each.text for each in stub.GreetMany(messages.Name(name="you"))]
            assert texts == ["hello you 0", "hello you 1", "hello you 2"]
            harness.swap(server.uri)
    for name in ("greeter_pb2", "greeter_pb2_grpc"):
        sys.modules.pop(name)


def test_interceptors_wrap_it(harness: Harness, echo: EchoServer) -> None:
    class Marked(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
        seen = 0

        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            self.seen += 1
            return continuation(details, request + b"!")

        intercept_unary_stream = intercept_unary_unary

    marked = Marked()
    channel = grpc.intercept_channel(harness.handler, marked)
    ask = channel.unary_unary(ECHO)
    assert ask(b"a") == b"a!"
    harness.swap(echo.uri)
    assert ask(b"b") == b"b!"
    assert ask.future(b"c").result(10) == b"c!"
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(COUNT)(b"1 "))
    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    assert marked.seen == 4
    eventually(lambda: harness.handler.calls == 0)


def test_interceptor_gets_a_failed_call_that_was_not_sent(make: Make) -> None:
    class Seen(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        outcome: Any = None

        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            self.outcome = continuation(details, request)
            return self.outcome

    seen = Seen()
    with pytest.raises(ConnectFailed):
        grpc.intercept_channel(make().handler, seen).unary_unary(ECHO)(b"", timeout=0.01)
    assert seen.outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen.outcome.done()


def test_subscribers_get_the_state_of_each_generation(harness: Harness, echo: EchoServer) -> None:
    handler, live = harness.handler, harness.live
    # gRPC's watching thread must have ended: if it is asked to connect, and its channel is closed
    # at that moment, it ends with a traceback.
    eventually(lambda: not live.channel._connectivity_state.polling)
    grpc.channel_ready_future(handler).result(10)
    reported: list[grpc.ChannelConnectivity] = []
    handler.subscribe(reported.append)
    eventually(lambda: reported[-1:] == [grpc.ChannelConnectivity.READY])
    reported.clear()
    harness.swap(echo.uri)
    eventually(lambda: reported[-1:] == [grpc.ChannelConnectivity.READY])
    handler.unsubscribe(reported.append)
    handler.unsubscribe(reported.append)
    assert not handler.gate.watched


# -- metadata --------------------------------------------------------------------------------------


def test_credentials_are_added_to_each_call(make: Make, echo: EchoServer) -> None:
    token = TokenCredentials("first")
    handler = make(echo.uri, credentials=token).handler
    ask = handler.unary_unary(METADATA)
    assert ["authorization", "first"] in json.loads(ask(b""))
    token.replace("second")
    both = json.loads(ask.with_call(b"", metadata=[("mine", "1")])[0])
    assert ["authorization", "second"] in both
    assert ["mine", "1"] in both
    assert "first" not in repr(token) + repr(handler)
    assert "second" not in repr(token) + repr(handler)


def test_async_credentials_are_refused(make: Make, echo: EchoServer) -> None:
    class Awaited:
        async def metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

    handler = make(echo.uri, credentials=Awaited()).handler
    with pytest.raises(ConfigError, match="asyncio only"):
        handler.unary_unary(ECHO)(b"")
    assert handler.calls == 0


# -- failed calls ----------------------------------------------------------------------------------


def test_failed_call_is_raised_and_reported_with_its_generation(
    harness: Harness, echo: EchoServer
) -> None:
    harness.swap(echo.uri)
    handler, code = harness.handler, grpc.StatusCode.ABORTED
    for call in (
        lambda: handler.unary_unary(FAIL)(b"ABORTED"),
        lambda: handler.unary_unary(FAIL).with_call(b"ABORTED"),
        lambda: handler.unary_unary(FAIL).future(b"ABORTED").result(10),
        lambda: list(handler.unary_stream(COUNT)(b"2 ABORTED")),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is code
        eventually(lambda: [(error.code(), at) for error, at in harness.reported] == [(code, 2)])
        harness.reported.clear()
    eventually(lambda: handler.calls == 0)


def test_cancelled_call_is_not_reported_as_an_error(harness: Harness) -> None:
    call = harness.handler.unary_unary(SLEEP).future(b"60")
    stream = harness.handler.unary_stream(ENDLESS)(b"0.01")
    assert next(stream) == b"0"
    assert call.cancel()
    assert stream.cancel()
    eventually(lambda: harness.handler.calls == 0)
    assert harness.reported == []


def test_failing_classify_does_not_change_the_callers_error(
    make: Make, echo: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(error: BaseException) -> bool:
        raise ZeroDivisionError

    with pytest.raises(grpc.RpcError) as raised:
        make(echo.uri, classify=defect).handler.unary_unary(FAIL)(b"ABORTED")
    assert raised.value.code() is grpc.StatusCode.ABORTED
    assert "ZeroDivisionError" in caplog.text


def test_call_to_a_killed_server_fails_and_is_reported(make: Make) -> None:
    with EchoServer() as server:
        harness = make(server.uri)
        call = harness.handler.unary_unary(SLEEP).future(b"60")
        list(harness.handler.unary_stream(COUNT)(b"1"))
        server.kill()
        with pytest.raises(grpc.RpcError) as raised:
            call.result(10)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        eventually(lambda: len(harness.reported) == 1)
        assert harness.reported[0][0].code() is grpc.StatusCode.UNAVAILABLE


# -- waiting for a generation ----------------------------------------------------------------------


def test_calls_wait_for_the_first_generation(make: Make, echo: EchoServer) -> None:
    harness = make()
    handler, endpoint = harness.handler, harness.endpoint
    asks: list[Callable[[], Any]] = [
        lambda: handler.unary_unary(ECHO)(b"a"),
        lambda: handler.unary_unary(ECHO).future(b"a").result(10),
        lambda: b"".join(handler.unary_stream(COUNT)(b"3")),
        lambda: handler.stream_unary(COLLECT)(iter([b"a"])),
        lambda: b"".join(handler.stream_stream(CHAT)(iter([b"a"]))),
    ]
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask) for ask in asks]
        eventually(lambda: endpoint.waiting == 5)
        harness.swap(echo.uri)
        assert [each.result(10) for each in answers] == [b"a", b"a", b"012", b"a", b"re: a"]
    eventually(lambda: endpoint.waiting == 0)


def test_a_call_no_longer_counts_as_waiting_when_its_caller_has_the_answer(
    make: Make, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    gate, left = harness.handler.gate, list[None]()
    tell = gate.tell

    def leave(event: Any, *given: Any) -> None:
        tell(event, *given)
        if event == harness.endpoint.leaves:
            time.sleep(0.2)  # however long the report takes, it comes before the answer
            left.append(None)

    monkeypatch.setattr(gate, "tell", leave)
    answer = harness.handler.unary_unary(ECHO).future(b"a")
    harness.swap(echo.uri)
    assert answer.result(10) == b"a"
    assert left == [None]
    eventually(lambda: harness.endpoint.waiting == 0)


def test_call_gets_the_remaining_time_after_its_wait(make: Make, echo: EchoServer) -> None:
    harness = make()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(harness.handler.unary_unary(LIMIT), b"", 10.0)
        eventually(lambda: harness.endpoint.waiting == 1)
        time.sleep(1.0)
        harness.swap(echo.uri)
        # gRPC rounds the timeout that it sends.
        assert 3 < float(answer.result(10)) < 9.5


def test_waiting_call_ends_with_its_timeout(make: Make) -> None:
    harness = make(FakeChannel())
    harness.lose(ConnectFailed("refused"))
    with pytest.raises(grpc.RpcError) as raised:
        harness.handler.unary_unary(ECHO)(b"", timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "north:1" in raised.value.details()
    assert "refused" in raised.value.details()
    assert isinstance(raised.value, ConnectFailed)
    eventually(lambda: harness.endpoint.waiting == 0)


def test_call_without_a_timeout_waits_for_the_connect_timeout(make: Make) -> None:
    stream = make(connect_timeout=0.05).handler.unary_stream(COUNT)(b"")
    with pytest.raises(ConnectFailed) as raised:
        next(stream)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_close_of_the_manager_fails_waiting_calls(make: Make) -> None:
    harness = make()
    ask = harness.handler.unary_unary(ECHO)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, b"")
        eventually(lambda: harness.endpoint.waiting == 1)
        harness.manager.close()
        with pytest.raises(ManagerClosed):
            answer.result(5)  # well before the call's own 10 s are over
    with pytest.raises(ManagerClosed):
        ask(b"")


def test_close_of_a_dedicated_channel_fails_its_waiting_calls() -> None:
    with EchoServer() as server, ConnectionManager() as manager:
        channel = manager.get_or_create(config_of(server), dedicated=True)
        server.kill()
        loss_noticed(channel)
        future = channel.unary_unary(ECHO).future(b"", 30)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(channel.unary_unary(ECHO), b"", 30)
            eventually(lambda: channel.endpoint.waiting == 2)
            channel.close()
            with pytest.raises(ManagerClosed):
                answer.result(10)
        with pytest.raises(grpc.RpcError, match="is closed"):
            future.result(10)
        assert manager.get_stats()["total_connections"] == 0


def test_close_of_a_shared_handler_releases_it(echo: EchoServer) -> None:
    with ConnectionManager() as manager:
        for _ in range(2):
            handler = manager.get_or_create(config_of(echo))
        with handler:
            pass
        assert manager.get_stats()["connections"][0]["client_count"] == 1
        assert handler.unary_unary(ECHO)(b"a") == b"a"


# -- swaps -----------------------------------------------------------------------------------------


def test_calls_use_the_new_generation_after_a_swap(make: Make) -> None:
    with EchoServer() as one, EchoServer() as other:
        harness = make(one.uri)
        handler, ask = harness.handler, harness.handler.unary_unary(PID)
        assert int(ask(b"")) == one.pid
        harness.swap(other.uri)
        assert int(ask(b"")) == other.pid
        assert (handler.generation, handler.address) == (2, other.address)
        assert repr(handler) == f"<Handler to {other.address}: generation 2, 0 calls>"


def test_replaced_generation_finishes_its_calls_and_is_closed(
    harness: Harness, echo: EchoServer
) -> None:
    handler, old = harness.handler, harness.live
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    assert next(numbers) == b"0"
    future = handler.unary_unary(SLEEP).future(b"0.3")
    harness.swap(echo.uri)
    assert ": retired, 2 calls" in repr(old)
    assert next(numbers) == b"1"
    assert future.result(10) == b"0.3"
    eventually(lambda: ": retired, 1 calls" in repr(old))
    numbers.cancel()
    harness.wait_closed()
    assert old.closed
    with pytest.raises(ValueError, match="closed"):
        old.channel.unary_unary(ECHO)(b"")


def test_calls_to_another_server_that_exceed_the_grace_are_cut(
    harness: Harness, echo: EchoServer
) -> None:
    call = harness.handler.unary_unary(SLEEP).future(b"60")
    harness.swap(echo.uri, "elsewhere:1")
    harness.leap(29.0)
    assert harness.handler.unary_unary(ECHO)(b"a") == b"a"
    assert not call.done()
    harness.leap(1.0)
    with pytest.raises(grpc.RpcError) as raised:
        call.result(10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    harness.wait_closed()
    assert harness.handler.unary_unary(ECHO)(b"a") == b"a"


def test_garbage_collected_stream_does_not_keep_its_generation(
    harness: Harness, echo: EchoServer
) -> None:
    old = harness.live
    numbers = harness.handler.unary_stream(ENDLESS)(b"0.01")
    next(numbers)
    harness.swap(echo.uri)
    del numbers
    gc.collect()
    harness.wait_closed()
    assert old.calls == []


def test_channel_that_arrives_after_the_close_is_closed() -> None:
    late, dialing = FakeChannel(), threading.Event()

    class Stubborn(ConnectionStrategy):
        """Makes its channel although the attempt is given up."""

        async def create_handler(self, config: ConnectionConfig) -> FakeChannel:
            dialing.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return late

        async def on_unavailable(self, managed: Any) -> bool:
            return True

        def close(self, managed: Any) -> None:
            pass

    with ConnectionManager(strategy=lambda config: Stubborn()) as manager:
        handler = manager.open_channel(ConnectionConfig.from_uri("http://north:1"))
        waiting = handler.unary_unary(ECHO).future(b"")
        assert dialing.wait(10)
    eventually(lambda: late.closed == 1)
    assert handler.generation == 0
    assert "is closed" in str(waiting.exception(10))


def test_lost_generation_makes_calls_wait(harness: Harness, echo: EchoServer) -> None:
    handler = harness.handler
    harness.lose()
    assert handler.generation == 0
    assert "no connection" in repr(handler)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler.unary_unary(ECHO), b"a")
        eventually(lambda: harness.endpoint.waiting == 1)
        harness.swap(echo.uri)
        assert answer.result(10) == b"a"


def test_no_call_is_lost_while_threads_call_and_generations_change(
    harness: Harness, echo: EchoServer
) -> None:
    over, handler = threading.Event(), harness.handler

    def work(number: int) -> int:
        ask, count, done = handler.unary_unary(ECHO), handler.unary_stream(COUNT), 0
        while not over.is_set():
            assert ask(b"a", timeout=30) == b"a"
            assert len(list(count(b"2", timeout=30))) == 2
            assert ask.future(b"b", timeout=30).result(30) == b"b"
            done += 1
        return done

    with ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(work, number) for number in range(6)]
        try:
            for _ in range(scaled(40, least=10)):
                harness.swap(echo.uri)
        finally:
            over.set()
        assert all(worker.result(60) > 0 for worker in workers)
    harness.wait_closed()


def test_swap_between_choosing_and_counting_a_generation_is_safe(
    harness: Harness, echo: EchoServer
) -> None:
    old = harness.live

    class Interleaved(list[None]):
        """Swaps generations just before a call is counted, as another thread could."""

        first = True

        def append(self, item: None) -> None:
            if self.first:
                self.first = False
                harness.swap(echo.uri)
                harness.wait_closed()
            super().append(item)

    old.calls = Interleaved()
    assert harness.handler.unary_unary(ECHO)(b"a", timeout=10) == b"a"
    assert (old.calls, harness.live.calls) == ([], [])
    assert old.closed


@pytest.mark.soak
def test_descriptors_threads_and_memory_stay_flat(harness: Harness, echo: EchoServer) -> None:
    handler = harness.handler
    ask, count = handler.unary_unary(ECHO), handler.unary_stream(COUNT)

    def cycle(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            numbers = count(b"3")
            assert next(numbers) == b"0"
            harness.swap(echo.uri)
            assert ask(b"a") == b"a"
            assert len(list(numbers)) == 2
        harness.wait_closed()
        eventually(lambda: threading.active_count() <= few)
        gc.collect()
        return descriptors(), threading.active_count(), tracemalloc.get_traced_memory()[0]

    few = threading.active_count() + 4
    tracemalloc.start()
    try:
        files, threads, memory = cycle(10)
        grown: list[int] = []
        # Something else in this process may allocate once; a leak grows in every round.
        while len(grown) < 3 and (not grown or grown[-1] > 100_000):
            later_files, later_threads, later_memory = cycle(100)
            grown.append(later_memory - memory)
            memory = later_memory
    finally:
        tracemalloc.stop()
    assert later_files <= files + 3
    assert later_threads <= threads + 2
    assert grown[-1] <= 100_000, grown
