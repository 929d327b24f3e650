"""What gRPC's channels know and do not offer: whether they are connected, and how to end calls.

Both use gRPC's private attributes. Where those are missing (a channel of the user's own, another
version of grpcio), a channel counts as not connected, and its calls end as `close()` ends them.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from grpc._cython import cygrpc  # type: ignore[import-untyped]

from ._channel_pool import lanes_of

__all__ = ["cut", "cut_async", "has_connection", "is_connected", "make_cuttable"]

#: How long calls that are cut may take to end, which needs no answer from the server.
CUT_TIMEOUT = 1.0


def is_connected(channel: Any) -> bool:
    """Whether the channel, or each channel of a pool, has a live connection."""
    return all(_is_ready(lane) for lane in lanes_of(channel))


def has_connection(channel: Any) -> bool:
    """Whether the channel, or any channel of a pool, has a live connection."""
    return any(_is_ready(lane) for lane in lanes_of(channel))


def _is_ready(channel: Any) -> bool:
    try:
        if hasattr(channel, "get_state"):
            return channel.get_state() is grpc.ChannelConnectivity.READY
        state = _core_of(channel).check_connectivity_state(False)
    except (AttributeError, ValueError):  # not gRPC's own, or closed
        return False
    return bool(state == grpc.ChannelConnectivity.READY.value[0])


def _core_of(channel: Any) -> Any:
    """The channel of gRPC's core, under any number of interceptors."""
    while not hasattr(channel, "check_connectivity_state"):
        channel = channel._channel
    return channel


def cut(channel: Any, why: str) -> None:
    """Close a channel of threads; its calls end with UNAVAILABLE."""
    for lane in lanes_of(channel):
        try:
            _core_of(lane).close(cygrpc.StatusCode.unavailable, why)
        except AttributeError:
            pass  # not gRPC's own
    channel.close()


def make_cuttable(channel: Any) -> None:
    """Have a channel of asyncio keep its calls, so that `cut_async` can end them."""
    for lane in lanes_of(channel):
        if hasattr(lane, "_channel") and not isinstance(lane._channel, _CuttableCore):
            lane._channel = _CuttableCore(lane._channel)


async def cut_async(channel: Any, why: str) -> None:
    """Close a channel of asyncio; its calls end with UNAVAILABLE.

    `close()` alone would cancel them: gRPC raises `asyncio.CancelledError` in whoever reads them,
    as if somebody had cancelled that task.
    """
    cores = [getattr(lane, "_channel", None) for lane in lanes_of(channel)]
    calls = [call for core in cores for call in list(getattr(core, "calls", ()))]
    ending = [asyncio.ensure_future(call.cut(why)) for call in calls if not call.done()]
    if ending:
        await asyncio.wait(ending, timeout=CUT_TIMEOUT)
        # What interceptors still have to do with such a call would be cancelled, too.
        await channel.close(CUT_TIMEOUT)
    else:
        await channel.close()


class _CuttableCore:
    """The core of a channel of asyncio, with its calls, also those that interceptors make."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.calls: weakref.WeakSet[_CuttableCall] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def call(self, *given: Any, **named: Any) -> _CuttableCall:
        call = _CuttableCall(self._core.call(*given, **named))
        self.calls.add(call)
        return call


class _CuttableCall:
    """The core of a call of asyncio; one that was cut was not cancelled by its owner."""

    __slots__ = ("__weakref__", "_core", "_cut")

    def __init__(self, core: Any) -> None:
        self._core = core
        self._cut: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def cut(self, why: str) -> None:
        """End the call with UNAVAILABLE, and wait until it has ended."""
        self._cut = cygrpc.AioRpcStatus(cygrpc.StatusCode.unavailable, why, (), why)
        self._core.cancel(why)
        await self._core.status()

    @property
    def _initial_metadata(self) -> Any:
        found = self._core._initial_metadata
        return found if self._cut is None else found or ()

    @property
    def _status(self) -> Any:
        return self._core._status if self._cut is None else self._cut

    def is_locally_cancelled(self) -> bool:
        return self._cut is None and bool(self._core.is_locally_cancelled())

    def cancelled(self) -> bool:
        return self._cut is None and bool(self._core.cancelled())

    async def status(self) -> Any:
        status = await self._core.status()
        return status if self._cut is None else self._cut
