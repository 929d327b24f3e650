"""Retry a failed call within its caller's timeout.

The caller's deadline is the only limit: a failed recovery does not end the retries. Without a
deadline, the number of tries is limited. The pause between two tries is 10 ms at first, and ends
early when there is a new connection; without a connection, the next try itself waits for one. A
call with refused credentials is retried after they are refreshed, if they can be.

Retry only calls that may be executed twice: a failed call may have been executed by the server.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections import namedtuple
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar, overload

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Backoff, Clock, Deadline

from .._any_loop import AnyLoopChannel
from .._dial import refused
from .._endpoint import Live
from .._errors import ConfigError
from .._fork import must_not_wait
from .._handler import AsyncHandler, Handler

__all__ = [
    "RETRIED_CODES",
    "AsyncRetryInterceptor",
    "RetryInterceptor",
    "retry_on_rpc_failure",
    "with_details",
]

F = TypeVar("F", bound=Callable[..., Any])
Channel = Handler | AsyncHandler

#: The server was unreachable, or asks for a retry. Other codes may come from a defect of the
#: server, which a retry would meet again.
RETRIED_CODES = frozenset({grpc.StatusCode.UNAVAILABLE})

#: The number of tries of a call without a deadline.
TRIES = 75


class _Attempts:
    """The tries of one call."""

    def __init__(
        self, policy: _RetryPolicy, handler: Channel | None, timeout: float | None
    ) -> None:
        self.handler = handler
        self._deadline = Deadline.after(timeout, Clock.system())
        self._tries = policy.retry_times
        self._codes = policy.codes
        self._backoff = policy.backoff.fresh()
        self._seen: Live | None = None

    def begin(self) -> float | None:
        """Begin another try; return its timeout."""
        if self.handler is not None:
            self._seen = self.handler.gate.live
        self._tries -= 1
        return self._deadline.timeout

    def pause(self, error: BaseException) -> float | None:
        """Return the pause before the next try; None if there is no next try."""
        code = getattr(error, "code", None)  # a user's bare RpcError has none
        if not isinstance(error, grpc.RpcError) or not callable(code) or code() not in self._codes:
            return None
        left = self._deadline.timeout
        if left is None:
            return self._backoff.fail() if self._tries > 0 else None
        pause = self._backoff.fail()
        # Shorten the pause rather than skip the last try before the deadline.
        return min(pause, left / 2) if left > 0.001 else None

    def again(self, error: BaseException) -> bool:
        """Wait before the next try; return whether there is one."""
        handler = self.handler
        if isinstance(handler, Handler) and must_not_wait():
            return False  # in a finalizer, where waiting would block all other threads
        if isinstance(handler, Handler) and self._refused(error):
            return handler.gate.await_credentials(self._deadline.timeout)
        if (pause := self.pause(error)) is None:
            return False
        # The pause ends early when there is another connection.
        if not isinstance(handler, Handler):
            time.sleep(pause)
        elif handler.gate.await_change(self._seen, pause):
            self._backoff.succeed()
        return True

    async def again_async(self, error: BaseException) -> bool:
        """Wait before the next try, on a loop; return whether there is one."""
        handler = self.handler
        if isinstance(handler, AsyncHandler) and self._refused(error):
            return await handler.gate.await_credentials(self._deadline.timeout)
        if (pause := self.pause(error)) is None:
            return False
        if not isinstance(handler, AsyncHandler):
            await asyncio.sleep(pause)
        elif await handler.gate.await_change(self._seen, pause):
            self._backoff.succeed()
        return True

    def _refused(self, error: BaseException) -> bool:
        """Whether the server refused the credentials, and they can be refreshed."""
        handler = self.handler
        return (
            handler is not None
            and handler.endpoint.refusals is not None
            and refused(error)
            and self._tries > 0
            and self._deadline.timeout != 0
        )


@dataclass(eq=False)
class _RetryPolicy:
    """The parameters of retries: see `retry_on_rpc_failure`."""

    handler: Channel | Callable[..., Channel] | None = None
    _: KW_ONLY
    retry_times: int = TRIES
    codes: Collection[grpc.StatusCode] = RETRIED_CODES
    initial_backoff: float = 0.01
    backoff_multiplier: float = 3.0
    max_backoff: float = 3.0
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if self.retry_times < 1:
            raise ConfigError(f"retry_times={self.retry_times!r} must be at least 1")
        self.codes = frozenset(self.codes)
        self.backoff = Backoff(
            self.initial_backoff,
            self.max_backoff,
            factor=self.backoff_multiplier,
            jitter=0.25,
            clock=self.clock,
        )

    def tries(self, timeout: float | None, given: tuple[Any, ...] = ()) -> _Attempts:
        """Return the attempts of one call."""
        return _Attempts(self, self._find(given), timeout)

    def _find(self, given: tuple[Any, ...]) -> Channel | None:
        """Return the given handler, or the one that the first argument is or has."""
        named = self.handler
        if isinstance(named, AnyLoopChannel):
            return named.current
        if isinstance(named, (Handler, AsyncHandler)):
            return named
        if named is not None:
            return named(*given)
        for owner in given[:1]:
            names = ("handler", "_handler")
            for found in (owner, *(getattr(owner, name, None) for name in names)):
                if isinstance(found, AnyLoopChannel):
                    return found.current
                if isinstance(found, (Handler, AsyncHandler)):
                    return found
        return None


@overload
def retry_on_rpc_failure(function: F, /) -> F: ...


@overload
def retry_on_rpc_failure(
    *,
    handler: Channel | Callable[..., Channel] | None = None,
    retry_times: int = TRIES,
    codes: Collection[grpc.StatusCode] = RETRIED_CODES,
    initial_backoff: float = 0.01,
    backoff_multiplier: float = 3.0,
    max_backoff: float = 3.0,
    clock: Clock | None = None,
) -> Callable[[F], F]: ...


def retry_on_rpc_failure(function: Any = None, /, **options: Any) -> Any:
    """Decorate a function or a method, plain or `async`, to retry it when an RPC in it fails.

    The keyword argument `timeout` of a call is the limit for all tries, and each try is passed the
    rest of it; without one, there are `retry_times` tries. The pause between tries ends early when
    the handler has a new connection. The handler is the first argument of the call, or its
    attribute `handler` or `_handler`, unless it is given here.

    :param codes: the status codes to retry; by default UNAVAILABLE. UNAUTHENTICATED is retried as
        well if the credentials have a `refresh` method, with the new credentials, unless these are
        refused too.
    :param initial_backoff: the first pause; each is `backoff_multiplier` times the one before, up
        to `max_backoff`, with a jitter of a quarter, so that callers do not retry all at once.
    """
    policy = _RetryPolicy(**options)

    def decorate(function: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return _repeat_async(policy, function)
        return _repeat(policy, function)

    return decorate if function is None else decorate(function)


def _repeat(policy: _RetryPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def repeated(*given: Any, **named: Any) -> Any:
        tries = policy.tries(named.get("timeout"), given)
        while True:
            left = tries.begin()
            try:
                return function(*given, **_timed(named, left))
            except grpc.RpcError as error:
                if not tries.again(error):
                    raise

    return repeated


def _repeat_async(policy: _RetryPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def repeated(*given: Any, **named: Any) -> Any:
        tries = policy.tries(named.get("timeout"), given)
        while True:
            left = tries.begin()
            try:
                return await function(*given, **_timed(named, left))
            except grpc.RpcError as error:
                if not await tries.again_async(error):
                    raise

    return repeated


def _timed(named: dict[str, Any], left: float | None) -> dict[str, Any]:
    return named if left is None else {**named, "timeout": left}


# -- interceptors ----------------------------------------------------------------------------------

_Details = namedtuple(
    "_Details",
    ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression"),
)


class _CallDetails(_Details, grpc.ClientCallDetails):  # type: ignore[misc]
    """The details of a call, as interceptors change them."""


class RetryInterceptor(_RetryPolicy, grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Retries unary calls: `grpc.intercept_channel(handler, RetryInterceptor(handler))`.

    The call's timeout is the limit. Calls that were begun with `future()` are not retried: no
    thread waits for them here. Parameters: see `retry_on_rpc_failure`.
    """

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """See `grpc.UnaryUnaryClientInterceptor`."""
        details = client_call_details
        tries = self.tries(details.timeout)
        while True:
            left = tries.begin()
            outcome = continuation(
                details if left is None else with_details(details, timeout=left), request
            )
            if not outcome.done() or (error := outcome.exception()) is None:
                return outcome
            if not tries.again(error):
                return outcome


def with_details(details: Any, **changes: Any) -> _CallDetails:
    """Return the details of a call with some of them changed."""
    given = {name: getattr(details, name, None) for name in _Details._fields}
    return _CallDetails(**{**given, **changes})


class AsyncRetryInterceptor(_RetryPolicy, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Retries unary calls: `intercept_aio_channel(handler, AsyncRetryInterceptor(handler))`.

    As an interceptor of gRPC's own channel it would retry calls over a lost connection. Parameters:
    see `retry_on_rpc_failure`.
    """

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """See `grpc.aio.UnaryUnaryClientInterceptor`."""
        details = client_call_details
        tries = self.tries(details.timeout)
        while True:
            left = tries.begin()
            timed = details if left is None else details._replace(timeout=left)
            call = await continuation(timed, request)
            try:
                await call
            except grpc.RpcError as error:
                if not await tries.again_async(error):
                    return call
            else:
                return call
