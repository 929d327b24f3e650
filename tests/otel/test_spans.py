"""Spans of checkouts, sends and calls, with real servers and the SDK of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.rpc.handlers import ECHO
from tests.rpc.servers import EchoServer

from moored.otel import instrument
from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolTimeout
from moored.rpc import AsyncConnectionManager, ConnectionConfig
from moored.sessions import NotSent, Sessions, Tcp
from moored.testing.demo import Demo


class Traces:
    """The spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def take(self) -> list[ReadableSpan]:
        """Return the spans since the last call."""
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    stop = instrument(made.provider)
    yield made
    stop()
    made.provider.shutdown()


async def test_a_checkout_is_a_span_of_its_caller(traces: Traces, postgres_url: str) -> None:
    async with AsyncConnectionPool(postgres_url, max_size=1, name="orders") as pool:
        with traces.tracer.start_as_current_span("request"):
            async with pool.connection() as conn:
                await conn.execute("select 1")
        conn = await pool.getconn()
        await pool.putconn(conn)
    inner, outer, other = traces.take()
    assert (inner.name, outer.name, other.name) == ("moored.checkout", "request", "moored.checkout")
    assert inner.attributes == {"db.client.connection.pool.name": "orders"} == other.attributes
    assert inner.parent == outer.context
    assert inner.kind is SpanKind.INTERNAL


async def test_a_checkout_that_fails_has_the_error(traces: Traces, postgres_url: str) -> None:
    async with AsyncConnectionPool(postgres_url, max_size=1) as pool, pool.connection():
        with pytest.raises(PoolTimeout):
            await pool.getconn(timeout=0.01)
    (failed,) = [each for each in traces.take() if each.status.status_code is StatusCode.ERROR]
    assert (failed.attributes or {})["error.type"] == "PoolTimeout"
    assert "no connection within" in (failed.status.description or "")
    assert failed.events == ()


def test_a_checkout_of_a_thread_is_a_span(traces: Traces, postgres_url: str) -> None:
    with ConnectionPool(postgres_url, max_size=1, name="threads") as pool:
        with pool.connection():
            pass
        pool.putconn(pool.getconn())
    first, second = traces.take()
    assert first.attributes == {"db.client.connection.pool.name": "threads"} == second.attributes


async def test_a_send_is_a_span_with_its_outcome_and_without_its_recipient(traces: Traces) -> None:
    async with Sessions() as sessions:
        alice = await sessions.start("alice", Demo(Tcp("127.0.0.1", 9)), offline=True)
        await alice.online(30)
        await alice.send("bob", "hello")
        await alice.disconnect()
        assert isinstance(await alice.send("bob", "hello", outcome=True), NotSent)
    acked, not_sent = traces.take()
    assert acked.name == not_sent.name == "moored.send"
    assert acked.kind is SpanKind.PRODUCER
    assert acked.attributes == {"messaging.system": "demo", "moored.outcome": "Acked"}
    assert (not_sent.attributes or {})["moored.outcome"] == "NotSent"


async def test_a_call_is_a_span(traces: Traces) -> None:
    with EchoServer() as echo:
        async with AsyncConnectionManager() as manager:
            channel = await manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
            assert await channel.unary_unary(ECHO)(b"a", timeout=60) == b"a"
    (call,) = [each for each in traces.take() if f"/{each.name.lstrip('/')}" == ECHO]
    assert call.kind is SpanKind.CLIENT
    assert (call.attributes or {})["rpc.grpc.status_code"] == 0


async def test_after_its_end_nothing_is_traced(postgres_url: str) -> None:
    before = AsyncConnectionPool.getconn, ConnectionPool.getconn
    traces = Traces()
    instrument(traces.provider)()
    assert before == (AsyncConnectionPool.getconn, ConnectionPool.getconn)
    async with AsyncConnectionPool(postgres_url, max_size=1) as pool, pool.connection():
        pass
    assert traces.take() == []
