"""The methods of both handlers: each call goes to the current generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from .._live_channel import LiveChannel
from ._call_count import counted
from ._kinds import KINDS, arguments
from ._pending_sync import start_later

if TYPE_CHECKING:
    from .._handler import Handler
    from .._handler_async import AsyncHandler

__all__ = ["async_method", "thread_method"]

H = TypeVar("H")


class _BoundMethod(Generic[H]):
    """One method of a service; it caches the method of the last used channel."""

    def __init__(
        self,
        handler: H,
        kind: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> None:
        self._handler = handler
        self._kind = kind
        self._how = (method, request_serializer, response_deserializer)
        self._more = {"_registered_method": True} if _registered_method else {}
        self._bound: tuple[LiveChannel | None, Any] = (None, None)

    def _inner(self, live: LiveChannel) -> Any:
        bound, inner = self._bound
        if bound is not live:
            inner = getattr(live.channel, self._kind)(*self._how, **self._more)
            self._bound = (live, inner)
        return inner


# -- for threads -----------------------------------------------------------------------------------


class _ThreadMethod(_BoundMethod["Handler"]):
    def _begin(self, how: str, request: Any, timeout: float | None, *rest: Any) -> Any:
        """Start a future or a stream; without a generation, return a pending call."""
        start = partial(self._go_on, how, request, rest)
        if (live := self._handler._enter_now()) is None:
            return start_later(self._handler, start, timeout)
        return start(live, timeout)

    def _go_on(self, how: str, request: Any, rest: Any, live: LiveChannel, timeout: Any) -> Any:
        handler = self._handler
        credential = handler._credential
        try:
            call = self._start(how, live, request, timeout, *rest)
        except BaseException as error:
            if isinstance(error, grpc.RpcError):
                handler._report(error, live, credential)
            live.leave()
            raise
        failed = partial(handler._report, live=live, credential=credential)
        return counted(call, live.calls, failed, live.tell_watcher)

    def _start(self, how: str, live: LiveChannel, *given: Any) -> Any:
        request, timeout, metadata, *rest = given
        call = getattr(self._inner(live), how)
        return call(request, timeout, self._handler._signed(metadata), *rest)


class _AnswerMethod(_ThreadMethod):
    """A method with one response."""

    def __call__(
        self,
        request: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
        *,
        request_iterator: Any = None,
    ) -> Any:
        # As `with_call`, but written out, because nearly every call is made here.
        handler = self._handler
        live, timeout = handler._enter(timeout)
        credential = handler._credential
        try:
            return self._inner(live)(
                request if request_iterator is None else request_iterator,
                timeout,
                handler._signed(metadata),
                credentials,
                wait_for_ready,
                compression,
            )
        except grpc.RpcError as error:
            handler._report(error, live, credential)
            handler._settle()  # the next call must not use a connection that this error ends
            raise
        finally:
            live.leave()

    def with_call(self, *given: Any, **named: Any) -> Any:
        handler = self._handler
        request, timeout, *rest = arguments(*given, **named)
        live, timeout = handler._enter(timeout)
        credential = handler._credential
        try:
            return self._start("with_call", live, request, timeout, *rest)
        except grpc.RpcError as error:
            handler._report(error, live, credential)
            handler._settle()
            raise
        finally:
            live.leave()

    def future(self, *given: Any, **named: Any) -> Any:
        return self._begin("future", *arguments(*given, **named))


class _StreamMethod(_ThreadMethod):
    """A method with a stream of responses."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._begin("__call__", *arguments(*given, **named))


grpc.UnaryUnaryMultiCallable.register(_AnswerMethod)
grpc.StreamUnaryMultiCallable.register(_AnswerMethod)
grpc.UnaryStreamMultiCallable.register(_StreamMethod)
grpc.StreamStreamMultiCallable.register(_StreamMethod)


def thread_method(handler: Handler, kind: str, *given: Any, **named: Any) -> _ThreadMethod:
    """Return a method of a `Handler`."""
    made: type[_ThreadMethod] = _StreamMethod if KINDS[kind].streams else _AnswerMethod
    return made(handler, kind, *given, **named)


# -- for asyncio -----------------------------------------------------------------------------------


class _AsyncMethod(_BoundMethod["AsyncHandler"]):
    def __call__(
        self,
        request: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
        *,
        request_iterator: Any = None,
    ) -> Any:
        request = request if request_iterator is None else request_iterator
        handler = self._handler
        handler._used_at = handler._now()
        live, rest = handler._live, (credentials, wait_for_ready, compression)
        if live is not None and not handler._deferred:
            if handler._credentials is not None:
                metadata = handler._signed(metadata)
            return self._call(live, request, timeout, metadata, *rest)
        if handler._closed:
            raise handler._closed_error()
        return KINDS[self._kind].pending(self._make(request, timeout, metadata, *rest), timeout)

    async def _make(self, request: Any, timeout: float | None, metadata: Any, *rest: Any) -> Any:
        handler = self._handler
        if not handler._deferred:
            live, timeout = await handler._next(timeout)
            return self._call(live, request, timeout, handler._signed(metadata), *rest)
        began, credential = handler._loop.time(), handler._credential
        metadata = await handler._sign_later(metadata, timeout)
        left = None if timeout is None else timeout - (handler._loop.time() - began)
        live, left = await handler._next(left)
        ended = None
        if credential != handler._credential:  # refreshed meanwhile: report it for the old ones
            ended = handler._counts_out(live, credential)
        return self._call(live, request, left, metadata, *rest, ended=ended)

    def _call(
        self,
        live: LiveChannel,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: bool | None,
        compression: Any,
        *,
        ended: Callable[[Any], None] | None = None,
    ) -> Any:
        call = self._inner(live)(
            request,
            timeout=timeout,
            metadata=metadata,
            credentials=credentials,
            wait_for_ready=wait_for_ready,
            compression=compression,
        )
        live.calls.append(None)
        call.add_done_callback(ended or live.ended)
        if metadata:
            _end_unstarted(call)
        return call


def _end_unstarted(call: Any) -> None:
    """Cancel a call that gRPC fails to start, so that its done callbacks run.

    gRPC does not start a call with invalid metadata. It raises in the task that awaits the call,
    but runs the done callbacks, one of which counts the call, only when the call is garbage.
    """
    if (invocation := getattr(call, "_invocation_task", None)) is not None:
        invocation.add_done_callback(lambda _: None if call.done() else call.cancel())


for _kind in ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"):
    getattr(grpc.aio, f"{_kind}MultiCallable").register(_AsyncMethod)


def async_method(handler: AsyncHandler, kind: str, *given: Any, **named: Any) -> _AsyncMethod:
    """Return a method of an `AsyncHandler`."""
    return _AsyncMethod(handler, kind, *given, **named)
