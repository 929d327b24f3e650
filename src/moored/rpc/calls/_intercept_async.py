"""Interceptors above an `AsyncHandler`.

`grpc.aio` takes interceptors when a channel is created: they would belong to one generation. These
are above the handler, so that a call that an interceptor retries goes to the current generation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from .._errors import ConfigError
from ._kinds import KINDS, FourKinds, arguments

__all__ = ["intercept_aio_channel"]


def intercept_aio_channel(
    channel: grpc.aio.Channel, *interceptors: grpc.aio.ClientInterceptor
) -> grpc.aio.Channel:
    """Return a channel with interceptors, the first outermost, as `grpc.intercept_channel` does.

    An interceptor returns the call; for a unary call, it may return a response instead. It may
    change everything but the method.
    """
    kinds = tuple(kind.interceptor for kind in KINDS.values())
    for each in interceptors:
        if not isinstance(each, kinds):
            raise ConfigError(f"{each!r} is not a grpc.aio.ClientInterceptor")
    return _Intercepted(channel, interceptors) if interceptors else channel


class _Intercepted(FourKinds):
    def __init__(self, channel: grpc.aio.Channel, interceptors: tuple[Any, ...]) -> None:
        self._channel = channel
        self._interceptors = interceptors

    def _method(self, kind: str, *given: Any, **named: Any) -> Any:
        inner = getattr(self._channel, kind)(*given, **named)
        chain = [
            getattr(each, f"intercept_{kind}")
            for each in self._interceptors
            if isinstance(each, KINDS[kind].interceptor)
        ]
        if not chain:
            return inner
        name = given[0] if given else named["method"]
        return _Chain(inner, chain, KINDS[kind].pending, name.encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> _Intercepted:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


grpc.aio.Channel.register(_Intercepted)


class _Chain:
    """One method behind its interceptors."""

    def __init__(self, inner: Any, chain: list[Any], pending: Any, method: bytes) -> None:
        self._inner = inner
        self._chain = chain
        self._pending = pending
        self._method = method

    def __call__(self, *given: Any, **named: Any) -> Any:
        request, timeout, metadata, credentials, wait_for_ready, compression = arguments(
            *given, **named
        )
        metadata = metadata or ()
        if not isinstance(metadata, grpc.aio.Metadata):
            metadata = grpc.aio.Metadata.from_tuple(tuple(metadata))
        details = grpc.aio.ClientCallDetails(
            self._method, timeout, metadata, credentials, wait_for_ready
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

        made: list[Any] = []

        async def go_on(details: Any, request: Any) -> Any:
            made.append(await self._run(step + 1, details, request, compression))
            return made[-1]

        outcome = await self._chain[step](go_on, details, request)
        if isinstance(outcome, grpc.aio.Call):
            return outcome
        call = made[-1] if made else _Answer(outcome)
        # OpenTelemetry's stream interceptors return generators that read the call.
        return _Stream(outcome, call) if hasattr(outcome, "__aiter__") else _Answer(outcome)


for _kind in ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"):
    getattr(grpc.aio, f"{_kind}MultiCallable").register(_Chain)


class _Stream:
    """A call whose messages come from an interceptor's generator."""

    def __init__(self, messages: Any, call: Any) -> None:
        self._messages = aiter(messages)
        self._call = call

    def __aiter__(self) -> Any:
        return self._messages

    async def read(self) -> Any:
        return await anext(self._messages, grpc.aio.EOF)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(lambda _: callback(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


grpc.aio.UnaryStreamCall.register(_Stream)
grpc.aio.StreamStreamCall.register(_Stream)


class _Answer(grpc.aio.UnaryUnaryCall):  # type: ignore[misc]
    """A call that has ended with an interceptor's own response."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def cancelled(self) -> bool:
        return False

    cancel = cancelled

    def done(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def time_remaining(self) -> None:
        return None

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""

    debug_error_string = details

    async def wait_for_connection(self) -> None:
        pass

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._response
