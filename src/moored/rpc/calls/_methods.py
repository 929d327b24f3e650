"""The methods of both handlers: each call goes to the current channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from .._endpoint import Live
from ._call_count import counted
from ._kinds import KINDS, arguments
from ._pending_sync import start_later

if TYPE_CHECKING:
    from .._gate import AsyncGate, Gate

__all__ = ["async_method", "thread_method"]

G = TypeVar("G")


class _BoundMethod(Generic[G]):
    """One method of a service; it caches the method of the last used channel."""

    def __init__(
        self,
        gate: G,
        kind: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> None:
        self._gate = gate
        self._kind = kind
        self._how = (method, request_serializer, response_deserializer)
        self._more = {"_registered_method": True} if _registered_method else {}
        self._bound: tuple[Live | None, Any] = (None, None)

    def _inner(self, live: Live) -> Any:
        bound, inner = self._bound
        if bound is not live:
            inner = getattr(live.channel, self._kind)(*self._how, **self._more)
            self._bound = (live, inner)
        return inner


# -- for threads -----------------------------------------------------------------------------------


class _ThreadMethod(_BoundMethod["Gate"]):
    def _begin(self, how: str, request: Any, timeout: float | None, *rest: Any) -> Any:
        """Start a future or a stream; without a generation, return a pending call."""
        start = partial(self._go_on, how, request, rest)
        if (live := self._gate.enter_now()) is None:
            return start_later(self._gate, start, timeout)
        return start(live, timeout)

    def _go_on(self, how: str, request: Any, rest: Any, live: Live, timeout: Any) -> Any:
        gate = self._gate
        credential = gate.credential
        try:
            metadata = gate.signed(rest[0])  # before the try below: its errors are not the server's
            try:
                call = self._start(how, live, request, timeout, metadata, *rest[1:])
            except grpc.RpcError as error:
                gate.report(error, live, credential)
                raise
        except BaseException:
            live.leave()
            raise
        over = partial(gate.call_over, live=live, credential=credential)
        return counted(call, live.calls, over, live.tell_watcher)

    def _start(self, how: str, live: Live, *given: Any) -> Any:
        return getattr(self._inner(live), how)(*given)


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
        gate = self._gate
        live, timeout = gate.enter(timeout)
        credential = gate.credential
        try:
            metadata = gate.signed(
                metadata
            )  # before the try below: its errors are not the server's
            try:
                answer = self._inner(live)(
                    request if request_iterator is None else request_iterator,
                    timeout,
                    metadata,
                    credentials,
                    wait_for_ready,
                    compression,
                )
            except grpc.RpcError as error:
                gate.report(error, live, credential)
                gate.settle()  # the next call must not use a connection that this error ends
                raise
            if live.unavailable:
                live.unavailable.clear()
            return answer
        finally:
            live.leave()

    def with_call(self, *given: Any, **named: Any) -> Any:
        gate = self._gate
        request, timeout, metadata, *rest = arguments(*given, **named)
        live, timeout = gate.enter(timeout)
        credential = gate.credential
        try:
            metadata = gate.signed(metadata)
            try:
                return self._start("with_call", live, request, timeout, metadata, *rest)
            except grpc.RpcError as error:
                gate.report(error, live, credential)
                gate.settle()
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


def thread_method(gate: Gate, kind: str, *given: Any, **named: Any) -> _ThreadMethod:
    """Return a method over a gate for threads."""
    made: type[_ThreadMethod] = _StreamMethod if KINDS[kind].streams else _AnswerMethod
    return made(gate, kind, *given, **named)


# -- for asyncio -----------------------------------------------------------------------------------


class _AsyncMethod(_BoundMethod["AsyncGate"]):
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
        gate = self._gate
        live, rest = gate.enter_now(), (credentials, wait_for_ready, compression)
        if live is not None and not gate.deferred:
            if gate.credentials is not None:
                metadata = gate.signed(metadata)
            return self._call(live, request, timeout, metadata, *rest)
        if gate.endpoint.closed:
            raise gate.closed_error()
        return KINDS[self._kind].pending(self._make(request, timeout, metadata, *rest), timeout)

    async def _make(self, request: Any, timeout: float | None, metadata: Any, *rest: Any) -> Any:
        gate = self._gate
        if not gate.deferred:
            live, timeout = await gate.enter(timeout)
            if gate.credentials is not None:
                metadata = gate.signed(metadata)
            return self._call(live, request, timeout, metadata, *rest)
        began, credential = gate.loop.time(), gate.credential
        metadata = await gate.sign_later(metadata, timeout)
        left = None if timeout is None else timeout - (gate.loop.time() - began)
        live, left = await gate.enter(left)
        ended = None
        if credential != gate.credential:  # refreshed meanwhile: report it for the old ones
            ended = gate.counts_out(live, credential)
        return self._call(live, request, left, metadata, *rest, ended=ended)

    def _call(
        self,
        live: Live,
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
        call.add_done_callback(ended or self._gate.ended)
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


def async_method(gate: AsyncGate, kind: str, *given: Any, **named: Any) -> _AsyncMethod:
    """Return a method over a gate for asyncio."""
    return _AsyncMethod(gate, kind, *given, **named)
