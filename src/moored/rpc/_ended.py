"""When a call of threads is over: it is counted out, once, whatever becomes of it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]

from ._live import Live

if TYPE_CHECKING:
    from ._handler import Handler

__all__ = ["counted"]


def counted(handler: Handler, live: Live, call: Any, credential: int) -> Any:
    """Count a call until it ends, which is after this has returned."""
    ended = _Ended(handler, live, call, credential)
    if not call.add_callback(ended):
        ended()
    return call


class _Ended:
    """Counts a call out once: when it is over, or when nobody has it any more.

    It must not hold the call: one that is forgotten would never be collected, and go on.
    """

    __slots__ = ("_call", "_credential", "_handler", "_live", "_once")

    def __init__(self, handler: Handler, live: Live, call: Any, credential: int) -> None:
        self._handler = handler
        self._live = live
        self._credential = credential
        self._once: list[None] = [None]
        self._call = weakref.ref(call, partial(_forgotten, live, self._once))

    def __call__(self) -> None:
        call = self._call()
        if call is not None and _has_failed(call):
            self._handler._failed(call, self._live, self._credential)
        if _first(self._once):
            self._live.leave()
        elif self._live.watcher is not None:
            self._live.watcher(self._live)


def _has_failed(call: Any) -> bool:
    return (
        isinstance(call, grpc.RpcError)
        and not call.cancelled()
        and call.code() is not grpc.StatusCode.OK
    )


def _forgotten(live: Live, once: list[None], reference: object) -> None:
    # In the garbage collector: no lock and no thread, only the count.
    if _first(once):
        live.calls.pop()


def _first(once: list[None]) -> bool:
    try:
        once.pop()
    except IndexError:
        return False
    return True
