"""The broker in simulated schedules, and defects planted into it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.broker.world import subscribers_come_and_go
from tests.mutants import planted_defects

from moored.broker import _replays
from moored.broker._audience import Audience, StreamBuffer
from moored.broker._broker import Broker
from moored.broker._events import LiveEvent
from moored.testing import Mutant, assert_caught, mutant, scaled, simulate

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _short_pages_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replays, "PAGE", 3)
    monkeypatch.setattr(_replays, "READS", 1)


def test_clients_get_every_event_of_their_tenant_once_or_a_reset() -> None:
    simulate(subscribers_come_and_go, scaled(2000))


def test_clients_get_every_event_on_a_busy_machine() -> None:
    simulate(subscribers_come_and_go, scaled(200), lateness=0.05, timer_slack=0.001)


def _everybody(self: Audience, tenant: str, channel: str) -> Iterator[StreamBuffer]:
    return iter([each for each in self._all if each.gets(channel)])


def _without_overrun(self: StreamBuffer, floor: Any) -> bool:
    self.overrun = False
    return _caught_up(self, floor)


def _without_floor(self: StreamBuffer, floor: Any) -> bool:
    caught_up = _caught_up(self, floor)
    self.floor = None
    return caught_up


def _silent(self: Broker, reason: str) -> None:
    pass


def _unbounded(self: StreamBuffer, event: LiveEvent) -> str:
    if self.floor is None or event.position > self.floor:
        self._items.append(event)
        self._notify()
    return ""


def _forgetful(self: StreamBuffer, floor: Any) -> bool:
    self._clear()
    return _caught_up(self, floor)


def _newest_always(self: StreamBuffer, id: str, position: Any) -> None:
    floor, self.floor = self.floor, None
    _keepalive(self, id, position)
    self.floor = floor


def _after_the_end(self: StreamBuffer, id: str, position: Any) -> None:
    reason, self.end_reason = self.end_reason, ""
    _keepalive(self, id, position)
    self.end_reason = reason


_caught_up, _keepalive = StreamBuffer.caught_up, StreamBuffer.keepalive

MUTANTS = [
    mutant(Audience, "hearers", _everybody, name="index by channel only"),
    mutant(StreamBuffer, "caught_up", _without_overrun, name="live events forgotten in the replay"),
    mutant(StreamBuffer, "caught_up", _without_floor, name="live events repeat the replay"),
    mutant(Broker, "_gap", _silent, name="gap without a reset"),
    mutant(StreamBuffer, "push", _unbounded, name="unbounded buffer"),
    mutant(StreamBuffer, "caught_up", _forgetful, name="not registered while it replays"),
    mutant(StreamBuffer, "keepalive", _newest_always, name="id of a broker that is behind"),
    mutant(StreamBuffer, "keepalive", _after_the_end, name="id after events were dropped"),
]


@pytest.mark.parametrize(
    "planted",
    planted_defects(
        MUTANTS,
        "live events forgotten in the replay",
        "live events repeat the replay",
        "not registered while it replays",
        "id of a broker that is behind",
    ),
)
def test_a_planted_defect_is_caught(planted: Mutant) -> None:
    assert_caught(subscribers_come_and_go, planted, within=500, clean=5)
