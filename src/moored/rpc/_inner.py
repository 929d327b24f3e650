"""What gRPC's channels know and do not offer: whether they are connected, and how to end calls.

Both use gRPC's private attributes. Where those are missing (a channel of the user's own, another
version of grpcio), a channel counts as not connected, and its calls end as `close()` ends them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from grpc._cython import cygrpc  # type: ignore[import-untyped]

from ._channel_pool import lanes_of

__all__ = ["cut", "cut_async", "is_connected"]

#: How long calls that are cut may take to end, which needs no answer from the server.
CUT_TIMEOUT = 1.0


def is_connected(channel: Any) -> bool:
    """Whether the channel, or each channel of a pool, has a live connection."""
    return all(_is_ready(lane) for lane in lanes_of(channel))


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


async def cut_async(channel: Any, why: str) -> None:
    """Close a channel of asyncio; its calls end with UNAVAILABLE.

    `close()` alone would cancel them: gRPC raises `asyncio.CancelledError` in whoever reads them,
    as if somebody had cancelled that task.
    """
    for lane in lanes_of(channel):
        calls = [_end(call, why) for call in list(getattr(lane, "_active_calls", ()))]
        ending = [asyncio.ensure_future(call.status()) for call in calls if call is not None]
        if ending:
            await asyncio.wait(ending, timeout=CUT_TIMEOUT)
    await channel.close()


def _end(call: Any, why: str) -> _CutCall | None:
    core = getattr(call, "_cython_call", None)
    if core is None or core.done():
        return None
    call._cython_call = ended = _CutCall(core, why)
    core.cancel(why)
    return ended


class _CutCall:
    """The core of a call of asyncio that was not cancelled by its owner, but ended by us."""

    def __init__(self, core: Any, why: str) -> None:
        self._core = core
        self._status = cygrpc.AioRpcStatus(cygrpc.StatusCode.unavailable, why, (), why)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def _initial_metadata(self) -> Any:
        return self._core._initial_metadata or ()

    def is_locally_cancelled(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    async def status(self) -> Any:
        await self._core.status()
        return self._status
