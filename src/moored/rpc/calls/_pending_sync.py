"""Pending calls for threads: futures and streams that wait for a connection.

Like gRPC's own, they are returned at once, and failures are raised when they are read. A thread of
their own starts them when there is a connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, Deadline

from .._errors import closed
from .._fork import must_not_wait, refuse_broken
from ._pending import CANCELLED
from ._unsent import CallUnsent, cannot_connect, from_finalizer, unsent

if TYPE_CHECKING:
    from .._endpoint import Live
    from .._gate import Gate

__all__ = ["PendingCall", "fail_pending", "start_later", "start_pending"]

Start = Callable[["Live", float | None], Any]


def start_later(gate: Gate, start: Start, timeout: float | None) -> PendingCall:
    """Return a call that begins when there is a generation, within its own timeout."""
    refuse_broken()
    if gate.endpoint.closed:
        raise closed(gate.endpoint.address)
    if must_not_wait():
        raise CallUnsent(*from_finalizer(gate.endpoint.address))
    began, limit = monotonic(), gate.wait_limit if timeout is None else timeout
    verdicts = gate.endpoint.verdicts

    def expired() -> None:
        waited, own = monotonic() - began, timeout is not None
        _fail(gate, call, *unsent(gate.endpoint.address, waited, own, gate.endpoint.last_error))

    call = PendingCall(gate, start, timeout)
    gate.unsettled.add(call)
    gate.tell(gate.endpoint.call_waits)
    with gate.changed:
        gate.pending.append(call)
    # After that: a timer that fires at once must find the call in the list.
    call.times_out_by(gate.later(max(limit, 0.001), expired))
    # `fail_pending` may have run before the call was in the list.
    if gate.endpoint.verdicts != verdicts and gate.endpoint.verdict is not None:
        _fail(gate, call, *cannot_connect(gate.endpoint.address, gate.endpoint.verdict))
    start_pending(gate)
    return call


def start_pending(gate: Gate) -> None:
    """Start all pending calls in a thread of their own, if there is a generation."""
    if gate.pending and (gate.live is not None or gate.endpoint.closed):
        gate.later(0.0, lambda: _start_all(gate))


def fail_pending(gate: Gate, verdict: BaseException) -> None:
    """Fail all pending calls: no connection can be made."""
    for call in list(gate.pending):
        _fail(gate, call, *cannot_connect(gate.endpoint.address, verdict))


def _start_all(gate: Gate) -> None:
    while gate.pending:
        live = gate.enter_now()
        if live is None and not gate.endpoint.closed:
            return
        with gate.changed:
            call = gate.pending.pop(0) if gate.pending else None
        if live is None:
            if call is not None:
                call.fail(CallUnsent(grpc.StatusCode.CANCELLED, str(closed(gate.endpoint.address))))
        elif call is not None:
            call.begin(live)
        else:
            live.leave()


def _fail(gate: Gate, call: PendingCall, code: grpc.StatusCode, text: str) -> None:
    if _take(gate, call):
        error = CallUnsent(code, text)
        gate.tell(gate.endpoint.unsent, error)
        call.fail(error)


def _take(gate: Gate, call: PendingCall) -> bool:
    """Remove a call from the pending ones; return whether it was one of them."""
    with gate.changed:
        if found := call in gate.pending:
            gate.pending.remove(call)
        return found


def _run_all(gate: Gate, callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        gate.background.safely(gate.endpoint, callback)


class PendingCall(grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """A call that begins when there is a connection, or fails when its timeout expires.

    :param start: makes the real call over a generation, with the rest of the timeout.
    """

    def __init__(self, gate: Gate, start: Start, timeout: float | None) -> None:
        super().__init__()
        #: Cancels the timer of its timeout.
        self.stop_timer: Callable[[], object] = lambda: None
        self._gate = gate
        self._start = start
        self._deadline = None if timeout is None else monotonic() + timeout
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._real: Any = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def settled(self) -> bool:
        """Whether the call has stopped waiting for a connection."""
        return self._over.is_set()

    # -- for the gate --------------------------------------------------------------------------

    def times_out_by(self, stop_timer: Callable[[], object]) -> None:
        """Take the function that stops the timer of its timeout."""
        self.stop_timer = stop_timer
        if self.settled:
            stop_timer()

    def begin(self, live: Live) -> None:
        """Make the real call, which the generation counts already."""
        if not self._settle(partial(self._make, live)):
            live.leave()

    def _make(self, live: Live) -> Any:
        try:
            return self._start(live, self.time_remaining())
        except BaseException as error:  # raised when the caller reads the call
            return _Failure(error)

    def fail(self, error: CallUnsent) -> None:
        """Fail the call."""
        self._settle(lambda: error)

    def abandon(self) -> None:
        """End the call in a forked child, without its callbacks; the parent continues it.

        A thread of the parent may have held its locks at the fork, so they are replaced.
        """
        if not self.settled:
            self._lock, self._over = threading.RLock(), threading.Event()
            why = "this process was forked while the call waited for a connection"
            self._real = CallUnsent(grpc.StatusCode.CANCELLED, f"not sent: {why}")
            self._over.set()

    def _settle(self, make: Callable[[], Any]) -> bool:
        """Make the real call, or its stand-in, unless there is one; return whether it was made."""
        with self._lock:
            if self._over.is_set():
                return False
            self._real = real = make()
            callbacks, self._callbacks = self._callbacks, []
            gate = self._gate
            gate.tell(gate.endpoint.leaves)  # before the caller can see the result
            self._over.set()
        self.stop_timer()
        # An interceptor may have returned an object that takes no callbacks.
        add = getattr(real, "add_callback", None)
        if ended := [each for each in callbacks if add is None or not add(each)]:
            # In another thread: a callback may block, and other calls or the loop thread wait here.
            gate.later(0.0, partial(_run_all, gate, ended))
        return True

    def _known(self, timeout: float | None = None) -> Any:
        """Return the real call, or its stand-in; wait until there is one."""
        if not self._over.wait(timeout):
            raise grpc.FutureTimeoutError
        return self._real

    # -- the interface of grpc.Call and grpc.Future --------------------------------------------

    def cancel(self) -> bool:
        """See `grpc.Future`."""
        if not self._settle(lambda: _Cancelled(grpc.StatusCode.CANCELLED, CANCELLED)):
            return bool(self._real.cancel())
        _take(self._gate, self)
        return True

    def cancelled(self) -> bool:
        """See `grpc.Future`."""
        return self._over.is_set() and bool(self._real.cancelled())

    def running(self) -> bool:
        """See `grpc.Future`."""
        return not self.done()

    is_active = running

    def done(self) -> bool:
        """See `grpc.Future`."""
        return self._over.is_set() and bool(self._real.done())

    def time_remaining(self) -> float | None:
        """See `grpc.Call`."""
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """See `grpc.Call`."""
        with self._lock:
            if self._over.is_set():
                return bool(self._real.add_callback(callback))
            self._callbacks.append(callback)
            return True

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        """See `grpc.Future`."""
        if not self.add_callback(lambda: fn(self)):
            fn(self)

    def result(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        deadline = Deadline.after(timeout, Clock.system())
        return self._known(timeout).result(deadline.timeout)

    def exception(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        deadline = Deadline.after(timeout, Clock.system())
        return self._known(timeout).exception(deadline.timeout)

    def traceback(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        deadline = Deadline.after(timeout, Clock.system())
        return self._known(timeout).traceback(deadline.timeout)

    def code(self) -> grpc.StatusCode:
        """See `grpc.Call`."""
        return self._known().code()

    def details(self) -> Any:
        """See `grpc.Call`."""
        return self._known().details()

    def debug_error_string(self) -> Any:
        """See `grpc.Call`."""
        return self._known().debug_error_string()

    def initial_metadata(self) -> Any:
        """See `grpc.Call`."""
        return self._known().initial_metadata()

    def trailing_metadata(self) -> Any:
        """See `grpc.Call`."""
        return self._known().trailing_metadata()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        real = self._known()
        return real.result() if isinstance(real, CallUnsent) else next(real)

    def __repr__(self) -> str:
        return f"<PendingCall: {self._real if self._over.is_set() else 'waits for a connection'!r}>"


class _Cancelled(CallUnsent):
    """Stands in for a call that was cancelled before it began."""

    def cancelled(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        raise grpc.FutureCancelledError

    def exception(self, timeout: float | None = None) -> Any:
        raise grpc.FutureCancelledError


class _Failure(CallUnsent):
    """Stands in for a call that could not be made, because its credentials raised, for instance."""

    def __init__(self, error: BaseException) -> None:
        if isinstance(error, grpc.Call):
            super().__init__(error.code(), error.details())
        else:
            super().__init__(grpc.StatusCode.UNKNOWN, f"not sent: {type(error).__name__}")
        self._error = error

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def exception(self, timeout: float | None = None) -> Any:
        return self._error
