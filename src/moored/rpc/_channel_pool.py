"""Several channels to one server, used as one: for servers that limit the calls per connection.

A server may limit the concurrent calls of one connection; further calls queue in the client. Over
several connections, more calls are in flight. A pool is a channel itself, so a single channel has
no overhead. All channels of a pool are connected before the pool is used, and are closed together.
A call uses the channel with the fewest calls in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import awaited, first_of

from .calls._call_count import counted
from .calls._kinds import KINDS, FourKinds

__all__ = ["AioChannelPool", "ChannelPool", "Connectivity", "lanes_of", "pooled", "pooled_async"]

Connectivity = Callable[[grpc.ChannelConnectivity], None]
Factory = Callable[[Any], Any]


def pooled(factory: Factory, number: int) -> Factory:
    """Return a factory of pools with `number` channels; for one channel, the factory itself.

    An async factory, which may talk to the server first, gives an async one.
    """
    if number == 1:
        return factory
    if inspect.iscoroutinefunction(factory):
        return partial(_pool_later, ChannelPool, factory, number)

    def make(config: Any) -> ChannelPool:
        made: list[grpc.Channel] = []
        with contextlib.ExitStack() as undo:
            for _ in range(number):
                made.append(factory(config))
                undo.callback(made[-1].close)
            undo.pop_all()
        return ChannelPool(made)

    return make


def pooled_async(factory: Factory, number: int) -> Factory:
    """Return a factory of pools of `grpc.aio` channels; the given factory may be async."""
    return factory if number == 1 else partial(_pool_later, AioChannelPool, factory, number)


async def _pool_later(pool: Factory, factory: Factory, number: int, config: Any) -> Any:
    made: list[Any] = []
    async with contextlib.AsyncExitStack() as undo:
        for _ in range(number):
            made.append(await awaited(factory(config)))
            undo.push_async_callback(_close, made[-1])
        undo.pop_all()
    return pool(made)


async def _close(channel: Any) -> None:
    await awaited(channel.close())


def lanes_of(channel: Any) -> Sequence[Any]:
    """Return the channels of a pool, or the channel itself if it is no pool."""
    if isinstance(channel, (ChannelPool, AioChannelPool)):
        return [lane.channel for lane in channel.lanes]
    return [channel]


class Lane:
    """One channel of a pool, and the number of its calls in flight."""

    __slots__ = ("calls", "channel")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: Its length is the number of calls in flight; append and pop need no lock.
        self.calls: list[None] = []

    def leave(self, *_: Any) -> None:
        """Count a call that has ended."""
        self.calls.pop()


def _worst(states: Sequence[grpc.ChannelConnectivity]) -> grpc.ChannelConnectivity:
    """Return READY if all states are; otherwise the first that is not."""
    wrong = [state for state in states if state is not grpc.ChannelConnectivity.READY]
    return wrong[0] if wrong else grpc.ChannelConnectivity.READY


# -- for threads -----------------------------------------------------------------------------------


class ChannelPool(FourKinds, grpc.Channel):  # type: ignore[misc]
    """Several `grpc.Channel`s, used as one."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self.lanes = [Lane(channel) for channel in channels]

    def _method(self, kind: str, *given: Any, **named: Any) -> _PoolMethod:
        made = _PoolStreamMethod if KINDS[kind].streams else _PoolMethod
        return made(self.lanes, kind, given, named)

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None = False) -> None:
        """Add a connectivity callback to the first channel, which stands for all of them."""
        self.lanes[0].channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Remove a connectivity callback."""
        self.lanes[0].channel.unsubscribe(callback)

    def close(self) -> None:
        """Close all channels."""
        for lane in self.lanes:
            lane.channel.close()

    def __enter__(self) -> ChannelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LaneMethod:
    """One method, over the channel with the fewest calls in flight."""

    def __init__(self, lanes: Sequence[Lane], kind: str, given: Any, named: Any) -> None:
        self._lanes = [(lane, getattr(lane.channel, kind)(*given, **named)) for lane in lanes]

    def _enter(self) -> tuple[Lane, Any]:
        found = min(self._lanes, key=lambda each: len(each[0].calls))
        found[0].calls.append(None)
        return found


class _PoolMethod(_LaneMethod):
    """A method with one answer."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._finish("__call__", given, named)

    def with_call(self, *given: Any, **named: Any) -> Any:
        return self._finish("with_call", given, named)

    def future(self, *given: Any, **named: Any) -> Any:
        return self._begin("future", given, named)

    def _finish(self, how: str, given: Any, named: Any) -> Any:
        lane, inner = self._enter()
        try:
            return getattr(inner, how)(*given, **named)
        finally:
            lane.leave()

    def _begin(self, how: str, given: Any, named: Any) -> Any:
        lane, inner = self._enter()
        try:
            call = getattr(inner, how)(*given, **named)
        except BaseException:
            lane.leave()
            raise
        return counted(call, lane.calls)


class _PoolStreamMethod(_PoolMethod):
    """A method that answers with a stream."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._begin("__call__", given, named)


# -- for asyncio -----------------------------------------------------------------------------------


class AioChannelPool(FourKinds, grpc.aio.Channel):  # type: ignore[misc]
    """Several `grpc.aio.Channel`s, used as one."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self.lanes = [Lane(channel) for channel in channels]

    def _method(self, kind: str, *given: Any, **named: Any) -> _AioPoolMethod:
        return _AioPoolMethod(self.lanes, kind, given, named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY if all channels are; otherwise the state of the first that is not."""
        return _worst([lane.channel.get_state(try_to_connect) for lane in self.lanes])

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state of the pool differs from the given one."""
        while self.get_state() is last_observed_state:
            lanes = [lane.channel for lane in self.lanes]
            await first_of(*(each.wait_for_state_change(each.get_state()) for each in lanes))

    async def channel_ready(self) -> None:
        """Wait until all channels are connected."""
        for lane in self.lanes:
            await lane.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close all channels."""
        await asyncio.gather(*(lane.channel.close(grace) for lane in self.lanes))

    async def __aenter__(self) -> AioChannelPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _AioPoolMethod(_LaneMethod):
    def __call__(self, *given: Any, **named: Any) -> Any:
        lane, inner = self._enter()
        try:
            call = inner(*given, **named)
        except BaseException:
            lane.leave()
            raise
        call.add_done_callback(lane.leave)
        return call
