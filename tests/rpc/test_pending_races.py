"""Calls of threads that wait for a connection: late and early events are harmless."""

from __future__ import annotations

from collections.abc import Callable

import grpc  # type: ignore[import-untyped]

from moored.rpc import ConfigError
from moored.rpc._handler import Handler
from moored.rpc._live_channel import LiveChannel
from moored.rpc.calls._pending_sync import PendingCall, start_later

from .test_retiring import Channel, ManualTimers


class Real:
    """A call that gRPC has begun."""


def waiting() -> tuple[Handler, PendingCall, ManualTimers, list[LiveChannel]]:
    """Return a waiting call; the first timer is its timeout."""
    timers, begun = ManualTimers(), list[LiveChannel]()

    def start(live: LiveChannel, timeout: float | None) -> Real:
        begun.append(live)
        return Real()

    handler = Handler(address="north:1", later=timers.later)
    return handler, start_later(handler, start, 5.0), timers, begun


def test_timeout_that_fires_after_the_call_began_changes_nothing() -> None:
    handler, call, timers, begun = waiting()
    live = LiveChannel(1, Channel(), "north:1")
    handler._swap(live)
    timers.fire(1)
    assert begun == [live]
    timers.fire(0)
    assert not isinstance(call._real, grpc.RpcError)


def test_call_whose_connection_is_lost_before_it_begins_waits_again() -> None:
    handler, call, timers, begun = waiting()
    handler._swap(LiveChannel(1, Channel(), "north:1"))
    handler._lose()
    timers.fire(1)
    assert not begun
    assert not call.settled
    live = LiveChannel(2, Channel(), "north:1")
    handler._swap(live)
    timers.fire(len(timers.set) - 1)
    assert begun == [live]


def test_call_refused_before_it_waits_fails_immediately() -> None:
    timers = ManualTimers()
    handler = Handler(address="north:1", later=timers.later)

    def refuse(change: int) -> None:
        if change > 0:
            handler._fail_waiting(ConfigError("a wrong option"))

    handler._on_waiting = refuse
    call = start_later(handler, lambda live, timeout: Real(), 5.0)
    assert call.settled
    assert "a wrong option" in str(call.details())


def test_timeout_that_expires_immediately_ends_the_call() -> None:
    def later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
        act()
        return lambda: None

    handler = Handler(address="north:1", later=later)
    call = start_later(handler, lambda live, timeout: Real(), 0.01)
    assert call.settled
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not handler._pending


def test_timer_of_a_call_that_began_before_it_was_set_is_cancelled() -> None:
    cancelled: list[float] = []

    def later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
        if delay:
            handler._pending[0].begin(LiveChannel(1, Channel(), "north:1"))
        return lambda: cancelled.append(delay)

    handler = Handler(address="north:1", later=later)
    start_later(handler, lambda live, timeout: Real(), 5.0)
    assert cancelled == [5.0]
