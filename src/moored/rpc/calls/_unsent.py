"""The errors of calls that were never sent: gRPC errors that are `ConnectFailed` as well.

Their `code()` is DEADLINE_EXCEEDED if the call's own timeout expired; UNAVAILABLE if the call had
no timeout, and the limit for such calls expired; FAILED_PRECONDITION if waiting cannot help,
because the configuration is wrong, or because the call was made in a finalizer.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import describe, duration

from .._errors import ConnectFailed

__all__ = ["AsyncCallUnsent", "CallUnsent", "cannot_connect", "from_finalizer", "unsent"]


def unsent(
    address: str, waited: float, own: bool, cause: BaseException | None
) -> tuple[grpc.StatusCode, str]:
    """Return code and details for a call that got no connection in time.

    :param own: whether the limit was the call's own timeout.
    """
    code = grpc.StatusCode.DEADLINE_EXCEEDED if own else grpc.StatusCode.UNAVAILABLE
    text = f"not sent: waited {duration(waited)} for a connection to {address or 'the server'}"
    return code, text if cause is None else f"{text}; the last failure: {describe(cause)}"


def cannot_connect(address: str, verdict: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return code and details for a call that cannot get a connection."""
    text = f"not sent: there is no connection to {address or 'the server'}: {describe(verdict)}"
    return grpc.StatusCode.FAILED_PRECONDITION, text


def from_finalizer(address: str) -> tuple[grpc.StatusCode, str]:
    """Return code and details for a call from a finalizer, which must not wait."""
    why = (
        "a finalizer made the call while the manager was busy, or during interpreter shutdown: no "
        "connection can be opened then; make the call before the object is garbage-collected"
    )
    # Not UNAVAILABLE, which would be retried, without success, while other threads are blocked.
    return grpc.StatusCode.FAILED_PRECONDITION, f"not sent: no connection to {address}: {why}"


class CallUnsent(ConnectFailed, grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """A call got no connection in time; nothing was sent."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        """Return DEADLINE_EXCEEDED, UNAVAILABLE or FAILED_PRECONDITION."""
        return self._code

    def details(self) -> str:
        """Return how long the call waited, and why there was no connection."""
        return self._details

    def initial_metadata(self) -> tuple[()]:
        """Return nothing: the call was not sent."""
        return ()

    def trailing_metadata(self) -> tuple[()]:
        """Return nothing: the call was not sent."""
        return ()

    def debug_error_string(self) -> str:
        """Return the details."""
        return self._details

    # An interceptor gets this error as the outcome of the call, which is a completed future.

    def cancelled(self) -> bool:
        """Return False."""
        return False

    is_active = cancel = running = cancelled

    def time_remaining(self) -> None:
        """Return None: the call has ended."""

    def done(self) -> bool:
        """Return True: the call has ended."""
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Return False: the call has ended, so the callback is not called."""
        return False

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """Call back at once: the call has ended."""
        fn(self)

    def result(self, timeout: float | None = None) -> Any:
        """Raise this error."""
        raise self

    def exception(self, timeout: float | None = None) -> CallUnsent:
        """Return this error."""
        return self

    def traceback(self, timeout: float | None = None) -> types.TracebackType | None:
        """Return the traceback of this error."""
        return self.__traceback__


class AsyncCallUnsent(ConnectFailed, grpc.aio.AioRpcError):  # type: ignore[misc]
    """A call got no connection in time; nothing was sent."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        grpc.aio.AioRpcError.__init__(
            self, code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details
        )

    def __str__(self) -> str:
        return f"{self.code().name}: {self.details()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code(), self.details())
