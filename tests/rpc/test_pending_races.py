"""Calls of threads that wait for a connection: late and early events are harmless."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConfigError
from moored.rpc._endpoint import Live
from moored.rpc.calls._pending_sync import PendingCall, start_later

from .handlers import eventually
from .harness import FakeChannel, Harness


class Real:
    """A call that gRPC has begun."""


class ManualTimers:
    """Collects the timers of a gate; the test fires them."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay: float, act: Callable[[], None]) -> Callable[[], object]:
        self.set.append((delay, act))
        return lambda: None

    def fire(self, number: int) -> None:
        self.set[number][1]()


@pytest.fixture
def harness() -> Iterator[Harness]:
    with Harness() as harness:
        yield harness


def start(live: Live, timeout: float | None) -> Real:
    live.leave()
    return Real()


def waiting(harness: Harness) -> tuple[PendingCall, ManualTimers, list[Live]]:
    """Return a waiting call; the first timer is its timeout."""
    timers, begun = ManualTimers(), list[Live]()

    def begin(live: Live, timeout: float | None) -> Real:
        begun.append(live)
        return start(live, timeout)

    harness.handler.gate.later = timers.later
    return start_later(harness.handler.gate, begin, 5.0), timers, begun


def test_timeout_that_fires_after_the_call_began_changes_nothing(harness: Harness) -> None:
    call, timers, begun = waiting(harness)
    live = harness.swap(FakeChannel())
    eventually(lambda: len(timers.set) == 2)
    timers.fire(1)
    assert begun == [live]
    timers.fire(0)
    assert isinstance(call._real, Real)
    assert harness.manager.get_stats()["counters"]["calls_unsent"] == 0


def test_call_whose_connection_is_lost_before_it_begins_waits_again(harness: Harness) -> None:
    call, timers, begun = waiting(harness)
    harness.swap(FakeChannel())
    eventually(lambda: len(timers.set) == 2)
    harness.lose()
    timers.fire(1)
    assert not begun
    assert not call.settled
    live = harness.swap(FakeChannel())
    eventually(lambda: len(timers.set) == 3)
    timers.fire(2)
    assert begun == [live]
    assert call.settled


def test_call_cancelled_just_before_it_begins_never_begins(harness: Harness) -> None:
    call, timers, begun = waiting(harness)
    live = harness.swap(FakeChannel())
    eventually(lambda: len(timers.set) == 2)

    class Interleaved(list[PendingCall]):
        """Cancels a call when it was chosen to begin, as another thread could."""

        def pop(self, index: SupportsIndex = -1) -> PendingCall:
            chosen = super().pop(index)
            assert chosen.cancel()
            return chosen

    harness.handler.gate.pending = Interleaved([call])
    timers.fire(1)
    assert call.cancelled()
    assert not begun
    assert not live.calls


def test_call_refused_before_it_waits_fails_immediately(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, endpoint = harness.handler.gate, harness.endpoint
    tell = gate.tell

    def refuse(event: Any, *given: Any) -> None:
        tell(event, *given)
        eventually(lambda: endpoint.verdicts == 1)

    monkeypatch.setattr(gate, "tell", refuse)
    harness.feed(ConfigError("a wrong option"))
    call = start_later(gate, start, 5.0)
    assert call.settled
    assert "a wrong option" in str(call.details())
    eventually(lambda: endpoint.waiting == 0)


def test_timeout_that_expires_immediately_ends_the_call(harness: Harness) -> None:
    gate = harness.handler.gate

    def later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
        act()
        return lambda: None

    gate.later = later
    call = start_later(gate, start, 0.01)
    assert call.settled
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not gate.pending


def test_timer_of_a_call_that_began_before_it_was_set_is_cancelled(harness: Harness) -> None:
    gate, cancelled = harness.handler.gate, list[float]()
    live = Live(1, FakeChannel(), "north:1", calls=[None])

    def later(delay: float, act: Callable[[], None]) -> Callable[[], object]:
        if delay:
            gate.pending.pop().begin(live)
        return lambda: cancelled.append(delay)

    gate.later = later
    assert start_later(gate, start, 5.0).settled
    assert cancelled == [5.0]
