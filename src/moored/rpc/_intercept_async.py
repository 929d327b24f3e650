"""Interceptors on top of a channel of asyncio.

gRPC gives them to a channel as it is made, which is too deep here: they would stay with one
generation. These stand above the handler, so that a call that one of them repeats goes to the
generation that is then the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ._errors import ConfigError
from ._pending import (
    PendingStreamStream,
    PendingStreamUnary,
    PendingUnaryStream,
    PendingUnaryUnary,
)

__all__ = ["intercept_aio_channel"]

_KINDS = {
    "unary_unary": (grpc.aio.UnaryUnaryClientInterceptor, PendingUnaryUnary),
    "unary_stream": (grpc.aio.UnaryStreamClientInterceptor, PendingUnaryStream),
    "stream_unary": (grpc.aio.StreamUnaryClientInterceptor, PendingStreamUnary),
    "stream_stream": (grpc.aio.StreamStreamClientInterceptor, PendingStreamStream),
}


def intercept_aio_channel(
    channel: grpc.aio.Channel, *interceptors: grpc.aio.ClientInterceptor
) -> grpc.aio.Channel:
    """What `grpc.intercept_channel` is for threads: the first one is given control first.

    An interceptor returns the call; that of a unary call may return an answer instead. It may
    change all but the method.
    """
    kinds = tuple(kind for kind, _ in _KINDS.values())
    for each in interceptors:
        if not isinstance(each, kinds):
            raise ConfigError(f"{each!r} is no interceptor of grpc.aio")
    return _Intercepted(channel, interceptors) if interceptors else channel


class _Intercepted(grpc.aio.Channel):  # type: ignore[misc]
    def __init__(self, channel: grpc.aio.Channel, interceptors: tuple[Any, ...]) -> None:
        self._channel = channel
        self._interceptors = interceptors

    def unary_unary(self, *given: Any, **named: Any) -> Any:
        return self._method("unary_unary", _UnaryRequest, given, named)

    def unary_stream(self, *given: Any, **named: Any) -> Any:
        return self._method("unary_stream", _UnaryRequest, given, named)

    def stream_unary(self, *given: Any, **named: Any) -> Any:
        return self._method("stream_unary", _StreamRequest, given, named)

    def stream_stream(self, *given: Any, **named: Any) -> Any:
        return self._method("stream_stream", _StreamRequest, given, named)

    def _method(self, kind: str, made: Any, given: Any, named: Any) -> Any:
        inner = getattr(self._channel, kind)(*given, **named)
        wanted, pending = _KINDS[kind]
        chain = [
            getattr(each, f"intercept_{kind}")
            for each in self._interceptors
            if isinstance(each, wanted)
        ]
        if not chain:
            return inner
        name = given[0] if given else named["method"]
        return made(inner, chain, pending, name.encode())

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> _Intercepted:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _Chain:
    """The interceptors of one method, and the method."""

    def __init__(self, inner: Any, chain: list[Any], pending: Any, method: bytes) -> None:
        self._inner = inner
        self._chain = chain
        self._pending = pending
        self._method = method

    def _begin(
        self,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: bool | None,
        compression: Any,
    ) -> Any:
        given = metadata or ()
        if not isinstance(given, grpc.aio.Metadata):
            given = grpc.aio.Metadata.from_tuple(tuple(given))
        details = grpc.aio.ClientCallDetails(
            self._method, timeout, given, credentials, wait_for_ready
        )
        return self._pending(self._run(0, details, request, compression), timeout)

    async def _run(self, step: int, details: Any, request: Any, compression: Any) -> Any:
        if step == len(self._chain):
            return self._inner(
                request,
                timeout=details.timeout,
                metadata=details.metadata,
                credentials=details.credentials,
                wait_for_ready=details.wait_for_ready,
                compression=compression,
            )

        async def go_on(details: Any, request: Any) -> Any:
            return await self._run(step + 1, details, request, compression)

        outcome = await self._chain[step](go_on, details, request)
        return outcome if isinstance(outcome, grpc.aio.Call) else _Answer(outcome)


class _UnaryRequest(_Chain, grpc.aio.UnaryUnaryMultiCallable):  # type: ignore[misc]
    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        return self._begin(request, timeout, metadata, credentials, wait_for_ready, compression)


class _StreamRequest(_Chain, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[misc]
    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin(request_iterator, timeout, *rest)


class _Answer(grpc.aio.UnaryUnaryCall):  # type: ignore[misc]
    """An answer that an interceptor had without a call."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._answer

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def time_remaining(self) -> None:
        return None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""

    async def debug_error_string(self) -> str:
        return ""

    async def wait_for_connection(self) -> None:
        pass
