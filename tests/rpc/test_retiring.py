"""A replaced generation is closed once, after its calls or its grace, by its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]

from moored.kernel import Generation
from moored.rpc._channel_pool import ChannelPool
from moored.rpc._handler import Handler
from moored.rpc._handler_async import AsyncHandler
from moored.rpc._live_channel import LiveChannel

from .handlers import opened


class Channel:
    """A connected channel that counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    def close(self) -> None:
        self.closed += 1


class AioChannel(Channel):
    async def close(self, grace: float | None = None) -> None:  # type: ignore[override]
        self.closed += 1


class ManualTimers:
    """Collects the timers of a handler; the test fires them."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.off: list[int] = []

    def later(self, delay: float, act: Callable[[], None]) -> Callable[[], object]:
        number = len(self.set)
        self.set.append((delay, act))
        return lambda: self.off.append(number)

    def fire(self, number: int) -> None:
        self.set[number][1]()


def busy(channel: Any) -> LiveChannel:
    """Make a generation with a call in flight."""
    live = LiveChannel(1, channel, "north:1")
    live.calls.append(None)
    return live


class Lost(Channel):
    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.IDLE


def test_calls_over_a_pool_are_not_cut_while_one_of_its_connections_is_up() -> None:
    for channels, closed in (([Channel(), Lost()], 0), ([Lost(), Lost()], 1)):
        timers, pool = ManualTimers(), ChannelPool(channels)
        handler = opened(Handler(grace=1.0, later=timers.later), busy(pool))
        handler._swap(LiveChannel(2, Channel(), "north:1"))
        timers.fire(0)
        for act in [act for delay, act in timers.set if not delay]:
            act()
        assert [each.closed for each in channels] == [closed] * 2


def retired() -> tuple[Handler, LiveChannel, ManualTimers]:
    """Return a handler whose first generation was replaced by one to the same server."""
    timers, live = ManualTimers(), busy(Channel())
    handler = opened(Handler(grace=1.0, later=timers.later), live)
    handler._swap(LiveChannel(2, Channel(), "north:1"))
    return handler, live, timers


def test_close_restarts_the_grace_of_a_replaced_generation() -> None:
    handler, _, timers = retired()
    handler._shut(5.0)
    assert [delay for delay, _ in timers.set] == [1.0, 5.0, 0.0]
    assert timers.off == [0]


def test_grace_that_ends_during_the_close_closes_the_channel_once() -> None:
    handler, live, timers = retired()
    live.leave()
    timers.fire(0)
    assert [delay for delay, _ in timers.set] == [1.0, 0.0]
    timers.fire(1)
    assert live.channel.closed == 1
    assert handler._wait_closed(0.0)


def test_grace_that_ends_after_the_close_changes_nothing() -> None:
    handler, live, timers = retired()
    live.leave()
    timers.fire(1)
    timers.fire(0)
    assert live.channel.closed == 1
    assert handler._wait_closed(0.0)


def test_call_that_ends_in_a_forked_child_closes_no_inherited_channel() -> None:
    handler, live, timers = retired()
    handler.reset()
    live.leave()
    assert len(timers.set) == 1


def test_handler_with_a_call_in_flight_does_not_sleep() -> None:
    live = busy(Channel())
    handler = opened(Handler(), live)
    assert handler._detach(Generation()) is None
    assert handler._is_open
    live.leave()
    heir = handler._detach(Generation())
    assert heir is not None
    assert heir._live is live
    assert not handler._is_open


async def retired_async() -> tuple[AsyncHandler, LiveChannel]:
    """See `retired`."""
    live = busy(AioChannel())
    handler = opened(AsyncHandler(grace=30.0), live)
    handler._swap(LiveChannel(2, AioChannel(), "north:1"))
    return handler, live


async def test_close_restarts_the_grace_of_a_replaced_generation_async() -> None:
    handler, live = await retired_async()
    cancel: Any = handler._retiring[live]
    handler._shut(60.0)
    assert cancel.__self__.cancelled()
    live.leave()
    await handler._wait_closed()
    assert live.channel.closed == 1


async def test_grace_that_ends_during_the_close_closes_the_channel_once_async() -> None:
    handler, live = await retired_async()
    handler._shut(60.0)
    live.leave()
    handler._grace_over(live)
    await handler._wait_closed()
    await asyncio.gather(*handler._closing)
    assert live.channel.closed == 1


async def test_handler_with_a_call_in_flight_does_not_sleep_async() -> None:
    live = busy(AioChannel())
    handler = opened(AsyncHandler(), live)
    assert handler._detach(Generation()) is None
    assert handler._is_open
    live.leave()
    heir = handler._detach(Generation())
    assert heir is not None
    assert heir._live is live
    assert not handler._is_open
