"""Whether a channel is connected, and how to end its calls with UNAVAILABLE.

gRPC offers neither, so both use its private attributes. Where those are missing (a user's own
channel class, another version of grpcio), a channel counts as not connected, and its calls end as
`close()` ends them.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import cache
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from ._channel_pool import lanes_of
from .calls._kinds import KINDS

__all__ = ["cut", "cut_async", "has_connection", "is_connected", "make_cuttable"]

try:
    from grpc._cython import cygrpc  # type: ignore[import-untyped]

    _Call: Any = cygrpc._AioCall
    _Core, _Status, _UNAVAILABLE = (
        cygrpc.AioChannel,
        cygrpc.AioRpcStatus,
        cygrpc.StatusCode.unavailable,
    )
except (ImportError, AttributeError):
    _Call, _Core, _Status, _UNAVAILABLE = object, None, None, None

_READY = grpc.ChannelConnectivity.READY.value[0]
_IDLE = grpc.ChannelConnectivity.IDLE.value[0]

log = logging.getLogger("moored.rpc")

#: Seconds in which aborted calls end; the server is not involved.
CUT_TIMEOUT = 1.0


def is_connected(channel: Any) -> bool:
    """Whether the channel has a live connection; of a pool, some of the channels may be idle."""
    states = {_state_of(lane) for lane in lanes_of(channel)}
    return _READY in states and states <= {_READY, _IDLE}


def has_connection(channel: Any) -> bool:
    """Whether the channel, or any channel of a pool, has a live connection."""
    return any(_state_of(lane) == _READY for lane in lanes_of(channel))


def _state_of(channel: Any) -> Any:
    """Return the number of gRPC's state of the channel; None if it is unknown."""
    try:
        if hasattr(channel, "get_state"):
            return channel.get_state().value[0]
        return _core_of(channel).check_connectivity_state(False)
    except (AttributeError, ValueError):  # not gRPC's own, or closed
        return None


def _core_of(channel: Any) -> Any:
    """Return the `cygrpc` channel below any number of interceptors."""
    while not hasattr(channel, "check_connectivity_state"):
        channel = channel._channel
    return channel


def cut(channel: Any, why: str) -> None:
    """Close a `grpc.Channel`; calls in flight end with UNAVAILABLE."""
    for lane in lanes_of(channel):
        try:
            _core_of(lane).close(_UNAVAILABLE, why)
        except AttributeError:
            pass  # not gRPC's own
    channel.close()


def make_cuttable(channel: Any) -> None:
    """Let a `grpc.aio.Channel` make its calls so that `cut_async` can end them."""
    for lane in lanes_of(channel) if _Core is not None else ():
        if isinstance(core := getattr(lane, "_channel", None), _Core):
            intercepted = any(getattr(lane, f"_{kind}_interceptors", True) for kind in KINDS)
            lane._channel = _CuttableCore(core, intercepted)


async def cut_async(channel: Any, why: str) -> None:
    """Close a `grpc.aio.Channel`; calls in flight end with UNAVAILABLE.

    `close()` alone would cancel them: gRPC raises `asyncio.CancelledError` in the task that reads
    such a call, as if that task had been cancelled.
    """
    if _Core is None:
        _say_what_is_off()
    calls = [call for lane in lanes_of(channel) for call in _calls_of(lane) if not call.done()]
    if ending := [asyncio.ensure_future(call.cut(why)) for call in calls]:
        await asyncio.wait(ending, timeout=CUT_TIMEOUT)
    # An interceptor may still have work to do for an aborted call: let it end.
    await (channel.close(CUT_TIMEOUT) if ending else channel.close())


@cache
def _say_what_is_off() -> None:
    log.warning(
        "grpcio %s lacks private names that moored.rpc uses: calls in flight over a grpc.aio "
        "channel that is closed are cancelled, instead of ending with UNAVAILABLE",
        grpc.__version__,
    )


def _calls_of(lane: Any) -> list[_CuttableCall]:
    calls = {getattr(call, "_cython_call", None) for call in getattr(lane, "_active_calls", ())}
    calls.update(getattr(getattr(lane, "_channel", None), "calls", ()))
    return [call for call in calls if isinstance(call, _CuttableCall)]


class _CuttableCore:
    """A proxy for a `cygrpc.AioChannel` that makes cuttable calls.

    The channel itself lists its calls, but not those that its interceptors make: these are listed
    here. Calls without interceptors are not slowed down by it.
    """

    def __init__(self, core: Any, intercepted: bool) -> None:
        self._core = core
        self._intercepted = intercepted
        # What gRPC asks most; the rest is passed on by name.
        self.close, self.closed = core.close, core.closed
        self.check_connectivity_state = core.check_connectivity_state
        self.calls: weakref.WeakSet[_CuttableCall] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def call(self, method: bytes, deadline: Any, credentials: Any, *rest: Any) -> Any:
        core = self._core
        if core.closed():
            return core.call(method, deadline, credentials, *rest)  # raises
        try:
            inner = None if credentials is None else credentials._credentials
            call = _CuttableCall(core, deadline, method, inner, *rest)
        except (AttributeError, TypeError):  # another version of grpcio
            return core.call(method, deadline, credentials, *rest)
        if self._intercepted:
            self.calls.add(call)
        return call


class _CuttableCall(_Call):  # type: ignore[misc]
    """A call that can be ended with UNAVAILABLE, and then does not count as cancelled."""

    _cut: Any = None

    async def cut(self, why: str) -> None:
        """End the call with UNAVAILABLE, and wait until it has ended."""
        self._cut = _Status(_UNAVAILABLE, why, (), why)
        self.cancel(why)
        await super().status()

    @property
    def _initial_metadata(self) -> Any:
        found = super()._initial_metadata
        return found if self._cut is None else found or ()

    @property
    def _status(self) -> Any:
        return super()._status if self._cut is None else self._cut

    def is_locally_cancelled(self) -> bool:
        return self._cut is None and bool(super().is_locally_cancelled())

    def cancelled(self) -> bool:
        return self._cut is None and bool(super().cancelled())

    def status(self) -> Any:
        # Every call asks this when it ends, so it costs no further coroutine then.
        return super().status() if self._cut is None and self.done() else self._final_status()

    async def _final_status(self) -> Any:
        status = await super().status()
        return status if self._cut is None else self._cut
