"""The methods of a handler of threads: each call goes to the channel that is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]

from ._ended import counted
from ._live import Live

if TYPE_CHECKING:
    from ._handler import Handler

__all__ = ["StreamStream", "StreamUnary", "UnaryStream", "UnaryUnary"]


class _Method:
    """One method of a service, bound to the channel of the generation that was last used."""

    def __init__(self, handler: Handler, kind: str, how: tuple[Any, ...], registered: bool) -> None:
        self._handler = handler
        self._kind = kind
        self._how = how
        self._more = {"_registered_method": True} if registered else {}
        self._bound: tuple[Live | None, Any] = (None, None)

    def _inner(self, live: Live) -> Any:
        bound, inner = self._bound
        if bound is not live:
            inner = getattr(live.channel, self._kind)(*self._how, **self._more)
            self._bound = (live, inner)
        return inner

    def _finish(self, how: str, request: Any, timeout: float | None, *rest: Any) -> Any:
        """Make a call that is over when it returns."""
        handler = self._handler
        live, timeout = handler._enter(timeout)
        credential = handler._credential
        try:
            return self._start(how, live, request, timeout, *rest)
        except grpc.RpcError as error:
            handler._failed(error, live, credential)
            raise
        finally:
            live.leave()

    def _begin(self, how: str, request: Any, timeout: float | None, *rest: Any) -> Any:
        """Make a call that goes on after this has returned."""
        handler = self._handler
        live, timeout = handler._enter(timeout)
        credential = handler._credential
        try:
            call = self._start(how, live, request, timeout, *rest)
        except BaseException as error:
            if isinstance(error, grpc.RpcError):
                handler._failed(error, live, credential)
            live.leave()
            raise
        return counted(handler, live, call, credential)

    def _start(
        self, how: str, live: Live, request: Any, timeout: float | None, metadata: Any, *rest: Any
    ) -> Any:
        call = getattr(self._inner(live), how)
        return call(request, timeout, self._handler._signed(metadata), *rest)


class UnaryUnary(_Method, grpc.UnaryUnaryMultiCallable):  # type: ignore[misc]
    """One request, one answer."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        # Written out: this is what nearly every call is.
        handler = self._handler
        live, timeout = handler._enter(timeout)
        credential = handler._credential
        try:
            return self._inner(live)(
                request,
                timeout,
                handler._signed(metadata),
                credentials,
                wait_for_ready,
                compression,
            )
        except grpc.RpcError as error:
            handler._failed(error, live, credential)
            raise
        finally:
            live.leave()

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._finish("with_call", request, timeout, *rest)

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin("future", request, timeout, *rest)


class UnaryStream(_Method, grpc.UnaryStreamMultiCallable):  # type: ignore[misc]
    """One request, many answers."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin("__call__", request, timeout, *rest)


class StreamUnary(_Method, grpc.StreamUnaryMultiCallable):  # type: ignore[misc]
    """Many requests, one answer."""

    def __call__(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._finish("__call__", request_iterator, timeout, *rest)

    def with_call(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._finish("with_call", request_iterator, timeout, *rest)

    def future(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin("future", request_iterator, timeout, *rest)


class StreamStream(_Method, grpc.StreamStreamMultiCallable):  # type: ignore[misc]
    """Many requests, many answers."""

    def __call__(
        self,
        request_iterator: Iterator[Any],
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        rest = (metadata, credentials, wait_for_ready, compression)
        return self._begin("__call__", request_iterator, timeout, *rest)
