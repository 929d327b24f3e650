"""Count a call over a `grpc.Channel` until it ends, or is garbage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import grpc  # type: ignore[import-untyped]

from .._fork import leaves_soon

__all__ = ["counted"]


def counted(
    call: Any,
    calls: list[None],
    over: Callable[[Any], object] | None = None,
    left: Callable[[], object] | None = None,
) -> Any:
    """Return the call, and remove it from the count when it ends.

    :param calls: its length is the number of calls in flight; this call is included.
    :param over: called first, with the call that has ended, or with the error that ended a stream.
    :param left: called after the call has ended, unless the garbage collector has ended it.
    """
    count = _Count(calls, over, left)
    if not hasattr(call, "add_callback"):
        return _CountedStream(call, count)
    # Weakly: otherwise an unreferenced call would never be collected, and continue.
    reference = weakref.ref(call, count.dropped)
    ended = partial(_call_ended, reference, count)
    if not call.add_callback(ended):
        ended()
    return call


class _Count:
    """Removes a call from the count once: when it has ended, or is garbage."""

    __slots__ = ("_calls", "_left", "_once", "_over")

    def __init__(self, calls: list[None], over: Any, left: Any) -> None:
        self._calls = calls
        self._over = over
        self._left = left
        self._once: list[None] = [None]

    def ended(self, call: Any) -> None:
        if call is not None and self._over is not None:
            self._over(call)
        self.forgotten()
        if self._left is not None:
            self._left()

    def dropped(self, _: object) -> None:
        leaves_soon()  # gRPC cancels the call, which a thread of gRPC waits for
        self.forgotten()

    def forgotten(self) -> None:
        # This may run in the garbage collector: it takes no lock and starts no thread.
        try:
            self._once.pop()
        except IndexError:
            return
        self._calls.pop()

    @property
    def open(self) -> bool:
        return bool(self._once)


def _call_ended(reference: weakref.ref[Any], count: _Count) -> None:
    count.ended(reference())


class _CountedStream:
    """A stream that is not a gRPC call: OpenTelemetry's interceptors return a generator.

    The call has ended when the stream was read to its end, or is garbage.
    """

    def __init__(self, stream: Any, count: _Count) -> None:
        self._stream = stream
        self._count = count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._stream)
        except BaseException as error:
            has_code = isinstance(error, grpc.RpcError) and callable(getattr(error, "code", None))
            self._end(error if has_code else None)
            raise

    def _end(self, error: BaseException | None) -> None:
        if self._count.open:
            self._count.ended(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __del__(self) -> None:
        self._end(None)
