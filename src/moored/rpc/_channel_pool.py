"""Several channels to one server that are used as one, for servers that limit the calls of each.

A server may allow only so many calls at a time over one connection; more of them wait in the
client, unseen. Over several connections, more calls are under way. A pool is a channel itself, so
whoever has just one pays nothing for it; all of a generation are connected before it is used, and
closed together. A call goes where the fewest are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

__all__ = ["AioChannelPool", "ChannelPool", "lanes_of", "pooled", "pooled_async"]

Connectivity = Callable[[grpc.ChannelConnectivity], None]
Factory = Callable[[Any], Any]


def pooled(factory: Factory, number: int) -> Factory:
    """A factory of pools with so many channels; of one channel, it is the factory itself.

    One that is awaited (it speaks with the server first, as Milvus's does) makes one that is.
    """
    if number == 1:
        return factory
    if inspect.iscoroutinefunction(factory):
        return partial(_pool_later, factory, number)

    def make(config: Any) -> ChannelPool:
        made: list[grpc.Channel] = []
        with contextlib.ExitStack() as undo:
            for _ in range(number):
                made.append(factory(config))
                undo.callback(made[-1].close)
            undo.pop_all()
        return ChannelPool(made)

    return make


async def _pool_later(factory: Factory, number: int, config: Any) -> ChannelPool:
    made: list[grpc.Channel] = []
    with contextlib.ExitStack() as undo:
        for _ in range(number):
            made.append(await factory(config))
            undo.callback(made[-1].close)
        undo.pop_all()
    return ChannelPool(made)


def pooled_async(factory: Factory, number: int) -> Factory:
    """The same for asyncio; the factory may be awaitable."""
    if number == 1:
        return factory

    async def make(config: Any) -> AioChannelPool:
        made: list[grpc.aio.Channel] = []
        async with contextlib.AsyncExitStack() as undo:
            for _ in range(number):
                channel = factory(config)
                made.append(await channel if inspect.isawaitable(channel) else channel)
                undo.push_async_callback(made[-1].close)
            undo.pop_all()
        return AioChannelPool(made)

    return make


def lanes_of(channel: Any) -> Sequence[Any]:
    """The channels of a pool; of anything else, itself."""
    if isinstance(channel, (ChannelPool, AioChannelPool)):
        return [lane.channel for lane in channel.lanes]
    return [channel]


class Lane:
    """One channel of a pool, and the calls that are under way over it."""

    __slots__ = ("calls", "channel")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: Its length is their number; appending and popping need no lock.
        self.calls: list[None] = []

    def leave(self, *_: Any) -> None:
        """A call has ended."""
        self.calls.pop()


def _worst(states: Sequence[grpc.ChannelConnectivity]) -> grpc.ChannelConnectivity:
    """The state of all together: READY only if all are."""
    wrong = [state for state in states if state is not grpc.ChannelConnectivity.READY]
    return wrong[0] if wrong else grpc.ChannelConnectivity.READY


# -- for threads -----------------------------------------------------------------------------------


class ChannelPool(grpc.Channel):  # type: ignore[misc]
    """Channels of threads, used as one."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self.lanes = [Lane(channel) for channel in channels]
        self._watches: dict[Connectivity, list[Connectivity]] = {}

    def unary_unary(self, *given: Any, **named: Any) -> _Method:
        """See `grpc.Channel`."""
        return _Method(self.lanes, "unary_unary", given, named)

    def unary_stream(self, *given: Any, **named: Any) -> _Method:
        """See `grpc.Channel`."""
        return _StreamMethod(self.lanes, "unary_stream", given, named)

    def stream_unary(self, *given: Any, **named: Any) -> _Method:
        """See `grpc.Channel`."""
        return _Method(self.lanes, "stream_unary", given, named)

    def stream_stream(self, *given: Any, **named: Any) -> _Method:
        """See `grpc.Channel`."""
        return _StreamMethod(self.lanes, "stream_stream", given, named)

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None = False) -> None:
        """Be told the state of all together, which is READY if all are."""
        watch = _Watch(callback, len(self.lanes))
        self._watches[callback] = [partial(watch, number) for number in range(len(self.lanes))]
        for lane, told in zip(self.lanes, self._watches[callback], strict=True):
            lane.channel.subscribe(told, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Not any more."""
        for lane, told in zip(self.lanes, self._watches.pop(callback, ()), strict=False):
            lane.channel.unsubscribe(told)

    def close(self) -> None:
        """Close all of them."""
        for lane in self.lanes:
            lane.channel.close()

    def __enter__(self) -> ChannelPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Watch:
    """Puts together what the channels of a pool tell, each in a thread of its own."""

    def __init__(self, callback: Connectivity, number: int) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._states = [grpc.ChannelConnectivity.IDLE] * number
        self._told: grpc.ChannelConnectivity | None = None

    def __call__(self, number: int, state: grpc.ChannelConnectivity) -> None:
        with self._lock:
            self._states[number] = state
            now = _worst(self._states)
            if now is self._told:
                return
            self._told = now
        self._callback(now)


class _Method:
    """One method, over whichever channel has the fewest calls."""

    def __init__(self, lanes: Sequence[Lane], kind: str, given: Any, named: Any) -> None:
        self._lanes = [(lane, getattr(lane.channel, kind)(*given, **named)) for lane in lanes]

    def _enter(self) -> tuple[Lane, Any]:
        found = min(self._lanes, key=_under_way)
        found[0].calls.append(None)
        return found

    def __call__(self, *given: Any, **named: Any) -> Any:
        lane, inner = self._enter()
        try:
            return inner(*given, **named)
        finally:
            lane.leave()

    def with_call(self, *given: Any, **named: Any) -> Any:
        lane, inner = self._enter()
        try:
            return inner.with_call(*given, **named)
        finally:
            lane.leave()

    def future(self, *given: Any, **named: Any) -> Any:
        lane, inner = self._enter()
        return _counted(lane, inner.future, given, named)


class _StreamMethod(_Method):
    """One whose call goes on after it was made."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        lane, inner = self._enter()
        return _counted(lane, inner, given, named)


def _under_way(each: tuple[Lane, Any]) -> int:
    return len(each[0].calls)


def _counted(lane: Lane, begin: Callable[..., Any], given: Any, named: Any) -> Any:
    try:
        call = begin(*given, **named)
    except BaseException:
        lane.leave()
        raise
    ended = _Ended(lane, call)
    if not call.add_callback(ended):
        ended()
    return call


class _Ended:
    """Counts a call out once: when it is over, or when nobody has it any more."""

    __slots__ = ("_call", "_lane", "_once")

    def __init__(self, lane: Lane, call: Any) -> None:
        self._lane = lane
        self._once: list[None] = [None]
        self._call = weakref.ref(call, self)

    def __call__(self, *_: Any) -> None:
        try:
            self._once.pop()
        except IndexError:
            return
        self._lane.leave()


# -- for asyncio -----------------------------------------------------------------------------------


class AioChannelPool(grpc.aio.Channel):  # type: ignore[misc]
    """Channels of asyncio, used as one."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self.lanes = [Lane(channel) for channel in channels]

    def unary_unary(self, *given: Any, **named: Any) -> _AioMethod:
        """See `grpc.aio.Channel`."""
        return _AioMethod(self.lanes, "unary_unary", given, named)

    def unary_stream(self, *given: Any, **named: Any) -> _AioMethod:
        """See `grpc.aio.Channel`."""
        return _AioMethod(self.lanes, "unary_stream", given, named)

    def stream_unary(self, *given: Any, **named: Any) -> _AioMethod:
        """See `grpc.aio.Channel`."""
        return _AioMethod(self.lanes, "stream_unary", given, named)

    def stream_stream(self, *given: Any, **named: Any) -> _AioMethod:
        """See `grpc.aio.Channel`."""
        return _AioMethod(self.lanes, "stream_stream", given, named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY if all are; otherwise the state of the first that is not."""
        return _worst([lane.channel.get_state(try_to_connect) for lane in self.lanes])

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state of all together."""
        while self.get_state() is last_observed_state:
            await _first(
                lane.channel.wait_for_state_change(lane.channel.get_state()) for lane in self.lanes
            )

    async def channel_ready(self) -> None:
        """Wait until all are connected."""
        for lane in self.lanes:
            await lane.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Close all of them."""
        await asyncio.gather(*(lane.channel.close(grace) for lane in self.lanes))

    async def __aenter__(self) -> AioChannelPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _AioMethod:
    """One method, over whichever channel has the fewest calls."""

    def __init__(self, lanes: Sequence[Lane], kind: str, given: Any, named: Any) -> None:
        self._lanes = [(lane, getattr(lane.channel, kind)(*given, **named)) for lane in lanes]

    def __call__(self, *given: Any, **named: Any) -> Any:
        lane, inner = min(self._lanes, key=_under_way)
        call = inner(*given, **named)
        lane.calls.append(None)
        call.add_done_callback(lane.leave)
        return call


async def _first(waits: Any) -> None:
    """Wait for the first of them, and leave none behind."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
