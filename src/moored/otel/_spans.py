"""Spans, by wrapping the methods of pools and sessions: without it they have no hook to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeAlias

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, get_tracer

from moored._version import __version__
from moored.kernel import describe
from moored.reservoir import AsyncConnectionPool, ConnectionPool
from moored.reservoir._pool_async import _AsyncCheckout
from moored.reservoir._pool_threads import _Checkout
from moored.sessions import Session

__all__ = ["instrument"]

Method: TypeAlias = Callable[..., Any]


def instrument(tracer_provider: TracerProvider | None = None) -> Callable[[], None]:
    """Trace checkouts of all pools, sends of all sessions and calls of all gRPC channels.

    Call it at the start of the program, before channels are made; returns a function that ends it.
    Calls are traced by `opentelemetry-instrumentation-grpc`, unless the program uses it already;
    those of threads always use the tracer provider of the process.
    """
    tracer = get_tracer("moored", __version__, tracer_provider)

    @contextmanager
    def span(name: str, kind: SpanKind, attributes: dict[str, str]) -> Iterator[Span]:
        # The SDK would record the text of an exception as it is, and it may hold a secret.
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with tracer.start_as_current_span(name, None, kind, attributes, **quiet) as made:  # type: ignore[arg-type]
            try:
                yield made
            except BaseException as error:
                made.set_attribute("error.type", type(error).__name__)
                made.set_status(Status(StatusCode.ERROR, describe(error)))
                raise

    def checkout(pool: Any) -> Any:
        attributes = {"db.client.connection.pool.name": pool.name}
        return span("moored.checkout", SpanKind.INTERNAL, attributes)

    def awaited(original: Method, pool_of: Callable[[Any], Any]) -> Method:
        async def method(self: Any, *given: Any, **named: Any) -> Any:
            with checkout(pool_of(self)):
                return await original(self, *given, **named)

        return method

    def blocking(original: Method, pool_of: Callable[[Any], Any]) -> Method:
        def method(self: Any, *given: Any, **named: Any) -> Any:
            with checkout(pool_of(self)):
                return original(self, *given, **named)

        return method

    def sending(original: Method, _: Callable[[Any], Any]) -> Method:
        async def send(self: Session, *given: Any, **named: Any) -> Any:
            system = {"messaging.system": self.protocol.name}
            with span("moored.send", SpanKind.PRODUCER, system) as made:
                outcome = await original(self, *given, **named)
                made.set_attribute("moored.outcome", type(outcome).__name__)
                return outcome

        return send

    undo = ExitStack()
    for owner, name, wrap, pool_of in (
        (AsyncConnectionPool, "getconn", awaited, lambda pool: pool),
        (_AsyncCheckout, "__aenter__", awaited, lambda checkout: checkout._pool),
        (ConnectionPool, "getconn", blocking, lambda pool: pool),
        (_Checkout, "__enter__", blocking, lambda checkout: checkout._pool),
        (Session, "send", sending, lambda session: session),
    ):
        original = vars(owner)[name]
        setattr(owner, name, wraps(original)(wrap(original, pool_of)))
        undo.callback(setattr, owner, name, original)
    _instrument_calls(tracer_provider, undo)
    return undo.close


def _instrument_calls(tracer_provider: TracerProvider | None, undo: ExitStack) -> None:
    try:
        from opentelemetry.instrumentation.grpc import (
            GrpcAioInstrumentorClient,
            GrpcInstrumentorClient,
        )
    except ModuleNotFoundError:
        return  # gRPC is not installed
    for kind in (GrpcInstrumentorClient, GrpcAioInstrumentorClient):
        instrumentor: Any = kind()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(tracer_provider=tracer_provider)
            undo.callback(instrumentor.uninstrument)
