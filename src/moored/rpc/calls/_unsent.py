"""A call that was never sent, as an error that users of gRPC know what to do with.

It is what gRPC raises for a call (`code()` and `details()` are there), and a `ConnectFailed` as
well. DEADLINE_EXCEEDED says that the call's own time was over; UNAVAILABLE, that it had no limit
and has waited for as long as a call without one may; FAILED_PRECONDITION, that to wait does not
help, as what the connection is made from is wrong, or as nothing can come while it waits.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import describe, duration

from .._errors import ConnectFailed

__all__ = [
    "AsyncCallUnsent",
    "CallUnsent",
    "cannot_connect",
    "cut_off",
    "from_finalizer",
    "unsent",
]


def unsent(
    address: str, waited: float, own: bool, cause: BaseException | None
) -> tuple[grpc.StatusCode, str]:
    """The code and the text for a call that found no connection.

    :param own: whether the limit was that of the call.
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
    where = (
        "it was made by a finalizer in the middle of a change of the manager, or at the end of the "
        "interpreter: none can come while it waits"
    )
    # Not UNAVAILABLE: who repeats the call would do so in vain, too, while all others wait for it.
    return grpc.StatusCode.FAILED_PRECONDITION, f"not sent: no connection to {address}, and {where}"


def cut_off(address: str, closed: bool) -> str:
    """Return the details for a call that was sent and is aborted with UNAVAILABLE."""
    why = "its channel was closed" if closed else "its connection was replaced"
    return f"cut off from {address or 'the server'}: {why}; it may have been carried out"


class CallUnsent(ConnectFailed, grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """There was no connection within the call's time; nothing was sent."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        """DEADLINE_EXCEEDED, UNAVAILABLE or FAILED_PRECONDITION."""
        return self._code

    def details(self) -> str:
        """How long it has waited, and why in vain."""
        return self._details

    def initial_metadata(self) -> tuple[()]:
        """There is none: nothing was sent."""
        return ()

    def trailing_metadata(self) -> tuple[()]:
        """There is none: nothing was sent."""
        return ()

    def debug_error_string(self) -> str:
        """The same as the details."""
        return self._details

    # An interceptor gets a failed call as its outcome, which is a future that is done.

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
        """Raise it."""
        raise self

    def exception(self, timeout: float | None = None) -> CallUnsent:
        """This very error."""
        return self

    def traceback(self, timeout: float | None = None) -> types.TracebackType | None:
        """Where it was raised."""
        return self.__traceback__


class AsyncCallUnsent(ConnectFailed, grpc.aio.AioRpcError):  # type: ignore[misc]
    """There was no connection within the call's time; nothing was sent."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        grpc.aio.AioRpcError.__init__(
            self, code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details
        )

    def __str__(self) -> str:
        return f"{self.code().name}: {self.details()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code(), self.details())
