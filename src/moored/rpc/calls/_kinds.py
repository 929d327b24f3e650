"""The four kinds of gRPC methods, and the arguments of a call as one tuple."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc.aio  # type: ignore[import-untyped]

from ._pending import (
    PendingStreamStream,
    PendingStreamUnary,
    PendingUnaryStream,
    PendingUnaryUnary,
)

__all__ = ["KINDS", "FourKinds", "arguments"]


class MethodKind(NamedTuple):
    """One kind of method."""

    #: Whether the response is a stream.
    streams: bool
    #: The base class of its `grpc.aio` interceptors, and the class of its pending calls.
    interceptor: type
    pending: type


KINDS = {
    "unary_unary": MethodKind(False, grpc.aio.UnaryUnaryClientInterceptor, PendingUnaryUnary),
    "unary_stream": MethodKind(True, grpc.aio.UnaryStreamClientInterceptor, PendingUnaryStream),
    "stream_unary": MethodKind(False, grpc.aio.StreamUnaryClientInterceptor, PendingStreamUnary),
    "stream_stream": MethodKind(True, grpc.aio.StreamStreamClientInterceptor, PendingStreamStream),
}


class FourKinds:
    """The four factories of a channel, implemented by `_method`."""

    def unary_unary(self, *given: Any, **named: Any) -> Any:
        """See `grpc.Channel`."""
        return self._method("unary_unary", *given, **named)

    def unary_stream(self, *given: Any, **named: Any) -> Any:
        """See `grpc.Channel`."""
        return self._method("unary_stream", *given, **named)

    def stream_unary(self, *given: Any, **named: Any) -> Any:
        """See `grpc.Channel`."""
        return self._method("stream_unary", *given, **named)

    def stream_stream(self, *given: Any, **named: Any) -> Any:
        """See `grpc.Channel`."""
        return self._method("stream_stream", *given, **named)

    def _method(self, kind: str, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


def arguments(
    request: Any = None,
    timeout: float | None = None,
    metadata: Any = None,
    credentials: Any = None,
    wait_for_ready: bool | None = None,
    compression: Any = None,
    *,
    request_iterator: Any = None,
) -> tuple[Any, ...]:
    """Return the arguments of a call of any kind, in gRPC's order."""
    request = request_iterator if request is None else request
    return request, timeout, metadata, credentials, wait_for_ready, compression
