"""The methods of a handler of asyncio: each call goes to the channel that is the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ._live import Live
from ._pending import (
    PendingStreamStream,
    PendingStreamUnary,
    PendingUnaryStream,
    PendingUnaryUnary,
)

if TYPE_CHECKING:
    from ._handler_async import AsyncHandler

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class _Method:
    """One method of a service, bound to the channel of the generation that was last used."""

    def __init__(
        self, handler: AsyncHandler, kind: str, how: tuple[Any, ...], registered: bool
    ) -> None:
        self._handler = handler
        self._kind = kind
        self._how = how
        self._more = {"_registered_method": True} if registered else {}
        self._bound: tuple[Live | None, Any] = (None, None)

    def _begin(
        self,
        pending: Any,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: bool | None,
        compression: Any,
    ) -> Any:
        handler = self._handler
        handler._used_at = handler._now()
        live = handler._live
        rest = (credentials, wait_for_ready, compression)
        if live is not None and not handler._deferred:
            return self._call(live, request, timeout, handler._signed(metadata), *rest)
        if handler._closed:
            raise handler._closed_error()
        return pending(self._make(request, timeout, metadata, *rest), timeout)

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
        if credential != handler._credential:  # refreshed since: the call says nothing about that
            ended = handler._counts_out(live, credential)
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
        bound, inner = self._bound
        if bound is not live:
            inner = getattr(live.channel, self._kind)(*self._how, **self._more)
            self._bound = (live, inner)
        call = inner(
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
    """See to it that a call that gRPC does not even start is over.

    It does not start one whose metadata are not what HTTP allows. Who awaits it is told; but those
    who wait for its end, and we count it until then, would be only when it is garbage.
    """
    if (invocation := getattr(call, "_invocation_task", None)) is not None:
        invocation.add_done_callback(lambda _: None if call.done() else call.cancel())


class UnaryUnary(_Method, grpc.aio.UnaryUnaryMultiCallable):  # type: ignore[misc]
    """One request, one answer."""

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
        # Written out: this is what nearly every call is.
        handler = self._handler
        live, inner = self._bound
        if handler._live is not live or live is None or handler._deferred:
            rest = (metadata, credentials, wait_for_ready, compression)
            return self._begin(PendingUnaryUnary, request, timeout, *rest)
        handler._used_at = handler._now()
        if handler._credentials is not None:
            metadata = handler._signed(metadata)
        call = inner(
            request,
            timeout=timeout,
            metadata=metadata,
            credentials=credentials,
            wait_for_ready=wait_for_ready,
            compression=compression,
        )
        live.calls.append(None)
        call.add_done_callback(live.ended)
        if metadata:
            _end_unstarted(call)
        return call


class UnaryStream(_Method, grpc.aio.UnaryStreamMultiCallable):  # type: ignore[misc]
    """One request, many answers."""

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
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin(PendingUnaryStream, request, timeout, *rest)


class StreamUnary(_Method, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[misc]
    """Many requests, one answer."""

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
        return self._begin(PendingStreamUnary, request_iterator, timeout, *rest)


class StreamStream(_Method, grpc.aio.StreamStreamMultiCallable):  # type: ignore[misc]
    """Many requests, many answers."""

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
        return self._begin(PendingStreamStream, request_iterator, timeout, *rest)
