"""Simulated schedules: losses, half-open links, changes of channels, cancelled subscribers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.logs import silent
from tests.mutants import planted_defects
from tests.reached import assert_reached

from moored.postgres.listen import Notification
from moored.postgres.listen._core import ChannelChange, ListenerCore
from moored.postgres.listen._direct import DirectConnection
from moored.testing import Mutant, assert_caught, base_seed, mutant, scaled, simulate

from .world import a_bad_day, seams

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with silent("moored"), seams():
        yield


# A quarter at a time: each part ends within a test's time.
@pytest.mark.parametrize("part", range(4))
def test_nothing_is_lost_silently_in_any_schedule(part: int) -> None:
    each = scaled(500, least=5)
    report = simulate(a_bad_day, each, first_seed=base_seed() + part * each)
    assert report.distinct == report.schedules


def test_nothing_is_lost_silently_with_inexact_timers() -> None:
    simulate(a_bad_day, scaled(200, least=3), first_seed=base_seed(), timer_slack=0.002)


def test_the_schedules_reach_every_kind_of_event() -> None:
    wanted = {"notification", "gap", "slow", "left", "reconnects", "failed series"}
    assert_reached(a_bad_day, wanted | {"silent link", "waits", "connects"}, within=20)


# -- planted defects ---------------------------------------------------------------------------


def _delivers_old(self: ListenerCore, token: int, notification: Notification) -> None:
    """Notifications of any generation are delivered."""
    for each in self._subscribers.get(notification.channel, ()):
        if each.gap is None:
            each.offer(notification, self._clock)


def _gives_up(self: ListenerCore, token: int, reason: str) -> bool:
    """After a series of five, no attempt is planned."""
    exhausted = _lost(self, token, reason)
    if exhausted:
        self.link.next_dial_at = None
    return exhausted


def _reports_no_gap(self: ListenerCore) -> None:
    """The end of a gap is not reported."""
    for each in self._all:
        if each.gap is not None and each.channels <= self._listened:
            each.gap = None


def _listens_too_early(self: ListenerCore) -> ChannelChange | None:
    """A channel counts as listened to when LISTEN is sent, and the gap ends with it."""
    change = _next_change(self)
    if change is not None:
        self._listened.update(change.listen)
        self._report_gaps()
    return change


def _keeps_unlistened(self: ListenerCore) -> ChannelChange | None:
    """A channel counts as listened to until UNLISTEN is confirmed, and longer."""
    change = _next_change(self)
    if change is not None:
        self._listened.update(change.unlisten)
    return change


async def _waits_for_ever(
    self: DirectConnection, event: Any, what: str, *, notifications: bool = False
) -> None:
    """A statement has no limit."""
    await asyncio.wait({event, self.lost}, return_when=asyncio.FIRST_COMPLETED)
    if self.lost.done():
        self.lost.result()


_lost, _next_change = ListenerCore.lost, ListenerCore.next_change

MUTANTS = [
    mutant(ListenerCore, "deliver", _delivers_old, name="an old generation is delivered"),
    mutant(ListenerCore, "lost", _gives_up, name="no attempt after a failed series"),
    mutant(ListenerCore, "_report_gaps", _reports_no_gap, name="a silent gap"),
    mutant(ListenerCore, "next_change", _listens_too_early, name="listening before LISTEN"),
    mutant(ListenerCore, "next_change", _keeps_unlistened, name="listening after UNLISTEN"),
    mutant(DirectConnection, "until", _waits_for_ever, name="a heartbeat that hangs"),
]


@pytest.mark.parametrize("planted", planted_defects(MUTANTS, "an old generation is delivered"))
def test_a_planted_defect_is_noticed(planted: Mutant) -> None:
    assert_caught(a_bad_day, planted, within=300, clean=0)
