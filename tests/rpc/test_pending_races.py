"""Calls of threads that wait for a connection: late and early events are harmless."""

from __future__ import annotations

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
