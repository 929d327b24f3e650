"""The handler for threads, over real servers: it stays valid while connections are replaced."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc._dial import TokenCredentials
from moored.rpc._errors import ConfigError, ConnectFailed, ManagerClosed
from moored.rpc._handler import Handler
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
    eventually,
    new_live,
    opened,
)
from .servers import EchoServer, make_stubs

Make = Callable[..., Handler]


@pytest.fixture
def make() -> Iterator[Make]:
    """Handlers that are closed at the end."""
    made: list[Handler] = []

    def make(live: LiveChannel | None = None, **named: Any) -> Handler:
        callbacks = {name: named.pop(name) for name in [*named] if name.startswith("on_")}
        made.append(opened(Handler(**named), live, **callbacks))
        return made[-1]

    yield make
    for handler in made:
        handler._shut(0.0)
        assert handler._wait_closed(10)
        assert handler.calls == 0


@pytest.fixture
def handler(make: Make, echo: EchoServer) -> Handler:
    return make(new_live(echo.uri))


class WaitingCalls:
    """Counts waiting calls, and can wait for a count."""

    def __init__(self) -> None:
        self.now = 0
        self._changed = threading.Condition()

    def __call__(self, change: int) -> None:
        with self._changed:
            self.now += change
            self._changed.notify_all()

    def until(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.now == number, 10)


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
        handler = make(new_live(server.uri))
        stub = services.GreeterStub(handler)
        for _ in range(2):
            assert stub.Greet(messages.Name(name="you"), timeout=10).text == "hello you"
            texts = [each.text for each in stub.GreetMany(messages.Name(name="you"))]
            assert texts == ["hello you 0", "hello you 1", "hello you 2"]
            handler._swap(new_live(server.uri))
    for name in ("greeter_pb2", "greeter_pb2_grpc"):
        sys.modules.pop(name)


def test_interceptors_wrap_it(handler: Handler, echo: EchoServer) -> None:
    class Marked(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
        seen = 0

        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            self.seen += 1
            return continuation(details, request + b"!")

        intercept_unary_stream = intercept_unary_unary

    marked = Marked()
    channel = grpc.intercept_channel(handler, marked)
    ask = channel.unary_unary(ECHO)
    assert ask(b"a") == b"a!"
    handler._swap(new_live(echo.uri))
    assert ask(b"b") == b"b!"
    assert ask.future(b"c").result(10) == b"c!"
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(COUNT)(b"1 "))
    assert raised.value.code() is grpc.StatusCode.UNKNOWN
    assert marked.seen == 4
    eventually(lambda: handler.calls == 0)


def test_interceptor_gets_a_failed_call_that_was_not_sent(make: Make) -> None:
    class Seen(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        outcome: Any = None

        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            self.outcome = continuation(details, request)
            return self.outcome

    seen = Seen()
    with pytest.raises(ConnectFailed):
        grpc.intercept_channel(make(), seen).unary_unary(ECHO)(b"", timeout=0.01)
    assert seen.outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen.outcome.done()


def test_subscribers_get_the_state_of_each_generation(handler: Handler, echo: EchoServer) -> None:
    live = handler._live
    assert live is not None
    # gRPC's watching thread must have ended: if it is asked to connect, and its channel is closed
    # at that moment, it ends with a traceback.
    eventually(lambda: not live.channel._connectivity_state.polling)
    grpc.channel_ready_future(handler).result(10)
    reported: list[grpc.ChannelConnectivity] = []
    handler.subscribe(reported.append)
    eventually(lambda: reported[-1:] == [grpc.ChannelConnectivity.READY])
    reported.clear()
    handler._swap(new_live(echo.uri))
    eventually(lambda: reported[-1:] == [grpc.ChannelConnectivity.READY])
    handler.unsubscribe(reported.append)
    handler.unsubscribe(reported.append)
    assert handler._subscribers == []


# -- metadata --------------------------------------------------------------------------------------


def test_credentials_are_added_to_each_call(make: Make, echo: EchoServer) -> None:
    token = TokenCredentials("first")
    handler = make(new_live(echo.uri), credentials=token)
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

    handler = make(new_live(echo.uri), credentials=Awaited())
    with pytest.raises(ConfigError, match="asyncio only"):
        handler.unary_unary(ECHO)(b"")
    assert handler.calls == 0


# -- failed calls ----------------------------------------------------------------------------------


def test_failed_call_is_raised_and_reported_with_its_generation(
    make: Make, echo: EchoServer
) -> None:
    reported: list[tuple[grpc.StatusCode, int]] = []
    handler = make(
        new_live(echo.uri, 7),
        on_rpc_error=lambda error, number: reported.append((error.code(), number)),
    )
    code = grpc.StatusCode.ABORTED
    for call in (
        lambda: handler.unary_unary(FAIL)(b"ABORTED"),
        lambda: handler.unary_unary(FAIL).with_call(b"ABORTED"),
        lambda: handler.unary_unary(FAIL).future(b"ABORTED").result(10),
        lambda: list(handler.unary_stream(COUNT)(b"2 ABORTED")),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is code
        eventually(lambda: reported == [(code, 7)])
        reported.clear()
    eventually(lambda: handler.calls == 0)


def test_failing_error_callback_does_not_change_the_callers_error(
    make: Make, echo: EchoServer
) -> None:
    def defect(error: grpc.RpcError, number: int) -> None:
        raise ZeroDivisionError

    handler = make(new_live(echo.uri), on_rpc_error=defect)
    with pytest.raises(grpc.RpcError) as raised:
        handler.unary_unary(FAIL)(b"ABORTED")
    assert raised.value.code() is grpc.StatusCode.ABORTED


def test_call_to_a_killed_server_fails_and_is_reported(make: Make) -> None:
    reported: list[grpc.StatusCode] = []
    with EchoServer() as server:
        handler = make(
            new_live(server.uri), on_rpc_error=lambda error, number: reported.append(error.code())
        )
        call = handler.unary_unary(SLEEP).future(b"60")
        list(handler.unary_stream(COUNT)(b"1"))
        server.kill()
        with pytest.raises(grpc.RpcError) as raised:
            call.result(10)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        eventually(lambda: reported == [grpc.StatusCode.UNAVAILABLE])


# -- waiting for a generation ----------------------------------------------------------------------


def test_calls_wait_for_the_first_generation(make: Make, echo: EchoServer) -> None:
    waits = WaitingCalls()
    handler = make(on_waiting=waits)
    asks: list[Callable[[], Any]] = [
        lambda: handler.unary_unary(ECHO)(b"a"),
        lambda: handler.unary_unary(ECHO).future(b"a").result(10),
        lambda: b"".join(handler.unary_stream(COUNT)(b"3")),
        lambda: handler.stream_unary(COLLECT)(iter([b"a"])),
        lambda: b"".join(handler.stream_stream(CHAT)(iter([b"a"]))),
    ]
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask) for ask in asks]
        waits.until(5)
        handler._swap(new_live(echo.uri))
        assert [each.result(10) for each in answers] == [b"a", b"a", b"012", b"a", b"re: a"]
    assert waits.now == 0


def test_a_call_no_longer_counts_as_waiting_when_its_caller_has_the_answer(
    make: Make, echo: EchoServer
) -> None:
    changes: list[int] = []

    def count(change: int) -> None:
        time.sleep(0.2 if change < 0 else 0.0)  # whatever the count takes, the caller sees it
        changes.append(change)

    handler = make(on_waiting=count)
    answer = handler.unary_unary(ECHO).future(b"a")
    handler._swap(new_live(echo.uri))
    assert answer.result(10) == b"a"
    assert changes == [+1, -1]


def test_call_gets_the_remaining_time_after_its_wait(make: Make, echo: EchoServer) -> None:
    waits = WaitingCalls()
    handler = make(on_waiting=waits)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler.unary_unary(LIMIT), b"", 10.0)
        waits.until(1)
        live = new_live(echo.uri)
        time.sleep(1.0)
        handler._swap(live)
        # gRPC rounds the timeout that it sends.
        assert 3 < float(answer.result(10)) < 9.5


def test_waiting_call_ends_with_its_timeout(make: Make) -> None:
    waits = WaitingCalls()
    handler = make(address="db:1", on_waiting=waits)
    handler._lose(ConnectFailed("refused"))
    with pytest.raises(grpc.RpcError) as raised:
        handler.unary_unary(ECHO)(b"", timeout=0.05)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "db:1" in raised.value.details()
    assert "refused" in raised.value.details()
    assert isinstance(raised.value, ConnectFailed)
    assert waits.now == 0


def test_call_without_a_timeout_waits_for_the_wait_limit(make: Make) -> None:
    handler = make(wait_limit=0.05)
    stream = handler.unary_stream(COUNT)(b"")
    with pytest.raises(ConnectFailed) as raised:
        next(stream)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_close_fails_waiting_calls(make: Make) -> None:
    waits = WaitingCalls()
    handler = make(on_waiting=waits)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler.unary_unary(ECHO), b"")
        waits.until(1)
        handler.close()
        with pytest.raises(ManagerClosed):
            answer.result(10)
    with pytest.raises(ManagerClosed):
        handler.unary_unary(ECHO)(b"")


def test_close_of_a_shared_handler_releases_it(make: Make, echo: EchoServer) -> None:
    released: list[None] = []
    handler = make(new_live(echo.uri), on_close=lambda: released.append(None))
    with handler:
        pass
    assert released == [None]
    assert handler.unary_unary(ECHO)(b"a") == b"a"


# -- swaps -----------------------------------------------------------------------------------------


def test_calls_use_the_new_generation_after_a_swap(make: Make) -> None:
    with EchoServer() as one, EchoServer() as other:
        handler = make(new_live(one.uri, 1))
        ask = handler.unary_unary(PID)
        assert int(ask(b"")) == one.pid
        handler._swap(new_live(other.uri, 2))
        assert int(ask(b"")) == other.pid
        assert (handler.generation, handler.address) == (2, other.address)
        assert repr(handler) == f"<Handler to {other.address}: generation 2, 0 calls>"


def test_replaced_generation_finishes_its_calls_and_is_closed(make: Make, echo: EchoServer) -> None:
    old = new_live(echo.uri)
    handler = make(old)
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    assert next(numbers) == b"0"
    future = handler.unary_unary(SLEEP).future(b"0.3")
    handler._swap(new_live(echo.uri))
    assert ": retired, 2 calls" in repr(old)
    assert next(numbers) == b"1"
    assert future.result(10) == b"0.3"
    eventually(lambda: ": retired, 1 calls" in repr(old))
    numbers.cancel()
    assert handler._wait_closed(10)
    assert old.closed
    with pytest.raises(ValueError, match="closed"):
        old.channel.unary_unary(ECHO)(b"")


def test_calls_to_another_server_that_exceed_the_grace_are_cut(
    make: Make, echo: EchoServer
) -> None:
    old = new_live(echo.uri)
    reported: list[int] = []
    handler = make(old, grace=0.2, on_rpc_error=lambda error, number: reported.append(number))
    call = handler.unary_unary(SLEEP).future(b"60")
    new = new_live(echo.uri)
    new.address = "elsewhere:1"
    handler._swap(new)
    with pytest.raises(grpc.RpcError) as raised:
        call.result(10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert handler._wait_closed(10)
    assert handler.unary_unary(ECHO)(b"a") == b"a"


def test_garbage_collected_stream_does_not_keep_its_generation(
    make: Make, echo: EchoServer
) -> None:
    old = new_live(echo.uri)
    handler = make(old)
    numbers = handler.unary_stream(ENDLESS)(b"0.01")
    next(numbers)
    handler._swap(new_live(echo.uri))
    del numbers
    gc.collect()
    assert handler._wait_closed(10)
    assert old.calls == []


def test_generation_that_arrives_after_the_close_is_closed(make: Make, echo: EchoServer) -> None:
    handler = make()
    handler.close()
    late = new_live(echo.uri)
    handler._swap(late)
    assert handler._wait_closed(10)
    assert late.closed


def test_lost_generation_makes_calls_wait(make: Make, echo: EchoServer) -> None:
    waits = WaitingCalls()
    handler = make(new_live(echo.uri), on_waiting=waits)
    handler._lose(ConnectFailed("gone"))
    assert handler.generation == 0
    assert "no connection" in repr(handler)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler.unary_unary(ECHO), b"a")
        waits.until(1)
        handler._swap(new_live(echo.uri))
        assert answer.result(10) == b"a"


def test_no_call_is_lost_while_threads_call_and_generations_change(
    make: Make, echo: EchoServer
) -> None:
    handler = make(new_live(echo.uri))
    over = threading.Event()

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
                handler._swap(new_live(echo.uri))
        finally:
            over.set()
        assert all(worker.result(60) > 0 for worker in workers)
    assert handler._wait_closed(10)


@pytest.mark.parametrize("drained", [False, True])
def test_swap_between_choosing_and_counting_a_generation_is_safe(
    make: Make, echo: EchoServer, drained: bool
) -> None:
    old, new = new_live(echo.uri, 1), new_live(echo.uri, 2)
    handler = make(old)

    class Interleaved(list[None]):
        """Swaps generations just before a call is counted, as another thread could."""

        first = True

        def append(self, item: None) -> None:
            if self.first:
                self.first = False
                if drained:
                    assert handler.drain(10)
                handler._swap(new)
                assert handler._wait_closed(10)
                handler.resume()
            super().append(item)

    old.calls = Interleaved()
    assert handler.unary_unary(ECHO)(b"a", timeout=10) == b"a"
    assert (old.calls, new.calls) == ([], [])
    assert old.closed


@pytest.mark.soak
def test_descriptors_threads_and_memory_stay_flat(make: Make, echo: EchoServer) -> None:
    handler = make(new_live(echo.uri))
    ask, count = handler.unary_unary(ECHO), handler.unary_stream(COUNT)

    def cycle(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            numbers = count(b"3")
            assert next(numbers) == b"0"
            handler._swap(new_live(echo.uri))
            assert ask(b"a") == b"a"
            assert len(list(numbers)) == 2
        assert handler._wait_closed(10)
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


# -- around a fork ---------------------------------------------------------------------------------


def test_drained_handler_has_no_call_in_flight(make: Make, echo: EchoServer) -> None:
    waits = WaitingCalls()
    handler = make(new_live(echo.uri), on_waiting=waits)
    slow = handler.unary_unary(SLEEP).future(b"0.3")
    assert handler.drain(10)
    assert slow.done()
    assert handler.calls == 0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handler.unary_unary(ECHO), b"a")
        waits.until(1)
        assert handler.calls == 0
        handler.resume()
        assert answer.result(10) == b"a"


def test_drain_ends_with_its_timeout(make: Make, echo: EchoServer) -> None:
    old = new_live(echo.uri)
    handler = make(old)
    numbers = handler.unary_stream(ENDLESS)(b"0.05")
    handler._swap(new_live(echo.uri))
    assert not handler.drain(0.05)
    numbers.cancel()
    assert handler.drain(10)
    handler.resume()
    assert handler.unary_unary(ECHO)(b"a") == b"a"


def test_generation_swapped_during_a_drain_is_used_after_resume(
    make: Make, echo: EchoServer
) -> None:
    handler = make(new_live(echo.uri, 1))
    assert handler.drain(10)
    handler._swap(new_live(echo.uri, 2))
    with pytest.raises(ConnectFailed):
        handler.unary_unary(ECHO)(b"", timeout=0.02)
    handler.resume()
    assert handler.generation == 2
    assert handler.unary_unary(ECHO)(b"a") == b"a"


def test_continuously_calling_threads_are_drained(make: Make, echo: EchoServer) -> None:
    handler = make(new_live(echo.uri))
    over = threading.Event()

    def work() -> None:
        ask = handler.unary_unary(ECHO)
        while not over.is_set():
            assert ask(b"a", timeout=30) == b"a"

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        try:
            for _ in range(scaled(50, least=10)):
                assert handler.drain(10)
                assert handler.calls == 0
                handler.resume()
        finally:
            over.set()
        for worker in workers:
            worker.result(30)


def test_reset_handler_of_a_forked_child_has_no_generation(make: Make, echo: EchoServer) -> None:
    inherited = new_live(echo.uri)
    handler = make(inherited)
    assert handler.drain(10)
    handler.reset()
    assert handler.generation == 0
    assert not inherited.closed
    with pytest.raises(ConnectFailed):
        handler.unary_unary(ECHO)(b"", timeout=0.01)
    handler._swap(new_live(echo.uri))
    assert handler.unary_unary(ECHO)(b"a") == b"a"
    inherited.channel.close()
