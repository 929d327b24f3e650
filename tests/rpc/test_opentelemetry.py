"""OpenTelemetry's instrumentation around our channels and below them, for all kinds of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from opentelemetry.instrumentation.grpc import (
    GrpcAioInstrumentorClient,
    GrpcInstrumentorClient,
    aio_client_interceptors,
    client_interceptor,
)
from opentelemetry.instrumentation.grpc.grpcext import intercept_channel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from moored.rpc import AsyncConnectionManager, ConnectionManager, intercept_aio_channel
from moored.rpc._channel_pool import lanes_of

from .handlers import CHAT, COLLECT, COUNT, ECHO, FAIL, eventually
from .servers import EchoServer
from .sides import LIMIT, config_of

METHODS = {ECHO, COUNT, COLLECT, CHAT}


class Traces:
    """The recorded spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def has_all(self) -> bool:
        spans = self._exporter.get_finished_spans()
        return {f"/{span.name.lstrip('/')}" for span in spans} >= METHODS


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture(params=["around", "under"])
def place(request: pytest.FixtureRequest) -> str:
    """Whether the user's channel is instrumented, or each gRPC channel below it."""
    return str(request.param)


@pytest.fixture
def instrumented(place: str, traces: Traces) -> Iterator[None]:
    kinds: list[Any] = [GrpcInstrumentorClient(), GrpcAioInstrumentorClient()]  # type: ignore[no-untyped-call]
    for kind in kinds if place == "under" else ():
        kind.instrument(tracer_provider=traces.provider)
    yield
    for kind in kinds if place == "under" else ():
        kind.uninstrument()


@pytest.mark.usefixtures("instrumented")
@pytest.mark.parametrize("lanes", [1, 2])
def test_calls_of_threads_are_traced(
    echo: EchoServer, traces: Traces, place: str, lanes: int
) -> None:
    with ConnectionManager(channels=lanes) as manager:
        held = channel = manager.get_or_create(config_of(echo))
        assert held.endpoint.live is not None
        (lane, *_) = lanes_of(held.endpoint.live.channel)
        assert ("opentelemetry" in type(lane).__module__) == (place == "under")
        if place == "around":
            channel = intercept_channel(held, client_interceptor(traces.provider))  # type: ignore[no-untyped-call]
        assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        assert channel.unary_unary(ECHO).future(b"a", timeout=LIMIT).result(LIMIT) == b"a"
        assert list(channel.unary_stream(COUNT)(b"2", timeout=LIMIT)) == [b"0", b"1"]
        assert channel.stream_unary(COLLECT)(iter([b"a", b"b"]), timeout=LIMIT) == b"ab"
        assert list(channel.stream_stream(CHAT)(iter([b"a"]), timeout=LIMIT)) == [b"re: a"]
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.unary_stream(COUNT)(b"1 ABORTED", timeout=LIMIT))
        assert raised.value.code() is grpc.StatusCode.ABORTED
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(FAIL)(b"UNAVAILABLE", timeout=LIMIT)
        eventually(lambda: manager.get_stats()["counters"]["unavailable_answers"] == 1)
        stream = channel.unary_stream(COUNT)(b"1000000", timeout=LIMIT)
        assert next(stream) == b"0"
        del stream  # forgotten, in the middle
        eventually(lambda: held.calls == 0)
        assert held.generation == 1
    if place == "around":  # the other takes the provider of the whole process
        eventually(traces.has_all)


async def _requests() -> AsyncIterator[bytes]:
    yield b"a"
    yield b"b"


async def _all(stream: Any) -> list[bytes]:
    return [each async for each in stream]


@pytest.mark.usefixtures("instrumented")
@pytest.mark.parametrize("lanes", [1, 2])
async def test_calls_of_asyncio_are_traced(
    echo: EchoServer, traces: Traces, place: str, lanes: int
) -> None:
    async with AsyncConnectionManager(channels=lanes) as manager:
        held = channel = await manager.get_or_create(config_of(echo))
        if place == "around":
            interceptors = aio_client_interceptors(traces.provider)  # type: ignore[no-untyped-call]
            channel = intercept_aio_channel(held, *interceptors)
        assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        assert await _all(channel.unary_stream(COUNT)(b"2", timeout=LIMIT)) == [b"0", b"1"]
        assert await channel.stream_unary(COLLECT)(_requests(), timeout=LIMIT) == b"ab"
        answers = await _all(channel.stream_stream(CHAT)(_requests(), timeout=LIMIT))
        assert answers == [b"re: a", b"re: b"]
        with pytest.raises(grpc.RpcError) as raised:
            await _all(channel.unary_stream(COUNT)(b"1 ABORTED", timeout=LIMIT))
        assert raised.value.code() is grpc.StatusCode.ABORTED
        with pytest.raises(grpc.RpcError):
            await channel.unary_unary(FAIL)(b"UNAVAILABLE", timeout=LIMIT)
        async with asyncio.timeout(LIMIT):
            while held.calls or not manager.get_stats()["counters"]["unavailable_answers"]:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        assert held.generation == 1
        stream = channel.unary_stream(COUNT)(b"2", timeout=LIMIT)
        assert [await stream.read() for _ in range(3)] == [b"0", b"1", grpc.aio.EOF]
        assert await stream.code() is grpc.StatusCode.OK
    eventually(traces.has_all)
