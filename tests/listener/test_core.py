"""The decisions of a listener, without a connection: when to dial, and who gets what."""

from __future__ import annotations

import asyncio
import random

import pytest

from moored.kernel import Clock, Dial, Machine
from moored.postgres.listen import Gap, Listener, Notification, NotifyRefused, Subscription
from moored.postgres.listen._core import CHART, ListenerCore
from moored.postgres.listen._direct import DirectConnection
from moored.postgres.listen._notify import statement

pytestmark = pytest.mark.pure


class Time:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = Clock(lambda: self.now, lambda: self.now + 1e9, random.Random(5))


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def core(time: Time) -> ListenerCore:
    return ListenerCore(Machine("listener", CHART, clock=time.clock), time.clock)


def subscription(*channels: str, buffer: int = 10) -> Subscription:
    return Subscription(Listener("postgresql://nowhere/db"), channels, buffer)


def dial(core: ListenerCore) -> int:
    """Take the dial that is due, or begin one during a pause."""
    link, now = core.link, core._clock.monotonic()
    link.want(now, "test")
    what = link.due(now)
    assert isinstance(what, Dial)
    return what.number


def go_up(core: ListenerCore) -> int:
    token = dial(core)
    core.connected(token)
    core.probed(token)
    while (change := core.next_change()) is not None:
        core.listened(token, change.listen)
    core.went_up(token)
    return token


def taken(events: Subscription) -> list[Notification | Gap]:
    async def take() -> list[Notification | Gap]:
        return [await anext(events) for _ in range(len(events))]

    return asyncio.run(take())


def test_attempts_come_in_series_with_half_jitter_and_never_end(
    core: ListenerCore, time: Time
) -> None:
    for _ in range(3):
        for base in (0.5, 1.0, 2.0, 4.0, 8.0):
            exhausted = core.lost(dial(core), "refused")
            assert core.link.next_dial_at is not None
            assert base <= core.link.next_dial_at - time.now < 1.5 * base
            assert exhausted == (base == 8.0)
            assert core.link.machine.at("down/waiting")
            time.now = core.link.next_dial_at
    assert core.failed_series == 3


def test_the_loss_of_a_proven_connection_is_retried_at_once(core: ListenerCore, time: Time) -> None:
    for _ in range(4):
        core.lost(dial(core), "refused")
    token = go_up(core)
    time.now += 1.0
    core.lost(token, "reset")
    assert core.link.next_dial_at == time.now
    core.lost(dial(core), "refused")
    assert core.link.next_dial_at < time.now + 0.75


def test_a_connection_that_is_dropped_immediately_is_not_retried_at_once(
    core: ListenerCore, time: Time
) -> None:
    core.lost(go_up(core), "dropped")
    assert core.link.next_dial_at is not None
    assert core.link.next_dial_at >= time.now + 0.5


def test_a_gap_begins_when_the_server_was_last_heard_and_comes_first(
    core: ListenerCore, time: Time
) -> None:
    events = subscription("a")
    core.add(events)
    token = go_up(core)
    taken(events)
    time.now += 7.0
    core.heard(token)
    heard = time.clock.wall()
    time.now += 3.0
    core.lost(token, "reset")
    core.deliver(token, Notification("a", "late", 1))
    token = go_up(core)
    core.deliver(token, Notification("a", "new", 1))
    assert taken(events) == [Gap(heard, "reset"), Notification("a", "new", 1)]


def test_a_subscriber_while_down_gets_a_gap_and_one_while_up_does_not(core: ListenerCore) -> None:
    before, after = subscription("a"), subscription("b")
    core.add(before)
    token = go_up(core)
    core.add(after)
    assert core.next_change() == (("b",), ())
    core.listened(token, ("b",))
    assert [type(event) for event in taken(before)] == [Gap]
    assert taken(after) == []


def test_a_notification_of_an_old_generation_is_ignored(core: ListenerCore) -> None:
    events = subscription("a")
    core.add(events)
    old = go_up(core)
    core.lost(old, "reset")
    go_up(core)
    taken(events)
    core.deliver(old, Notification("a", "old", 1))
    assert taken(events) == []
    assert core.ignored == 1


def test_a_channel_that_is_subscribed_again_during_unlisten_is_listened_to_again(
    core: ListenerCore,
) -> None:
    first, second = subscription("a"), subscription("a")
    core.add(first)
    token = go_up(core)
    core.remove(first)
    assert core.next_change() == ((), ("a",))
    core.add(second)
    assert not core.listens_to(second.channels)
    assert core.next_change() == (("a",), ())
    core.listened(token, ("a",))
    core.deliver(token, Notification("a", "1", 1))
    assert taken(second) == [Notification("a", "1", 1)]


def test_a_channel_is_unlistened_when_its_last_subscriber_leaves(core: ListenerCore) -> None:
    first, second = subscription("a", "b"), subscription("a")
    core.add(first)
    core.add(second)
    go_up(core)
    core.remove(first)
    core.remove(first)
    assert core.next_change() == ((), ("b",))
    assert core.channels == ["a"]


def test_an_overflow_is_one_gap_in_its_place(time: Time) -> None:
    events = subscription("a", buffer=2)
    for number in range(5):
        events.offer(Notification("a", str(number), 1), time.clock)
    assert len(events) == 3
    assert events.dropped == 3
    got = taken(events)
    assert got == [
        Notification("a", "0", 1),
        Notification("a", "1", 1),
        Gap(time.clock.wall(), "slow"),
    ]
    events.offer(Notification("a", "5", 1), time.clock)
    assert taken(events) == [Notification("a", "5", 1)]


@pytest.mark.parametrize("channel", ["", "x" * 64, "é" * 32, "a\0b", "a\udcff"])
def test_an_invalid_channel_is_refused(channel: str) -> None:
    with pytest.raises(NotifyRefused, match="channel name"):
        subscription(channel)


async def test_a_payload_is_limited_by_its_bytes_and_the_error_names_the_outbox() -> None:
    listener = Listener("postgresql://nowhere/db")
    with pytest.raises(NotifyRefused, match=r"8,000 bytes.*Outbox"):
        await listener.notify("a", "é" * 4000)
    with pytest.raises(Exception, match="notify_through"):
        await listener.notify("a", "é" * 3999)


def test_a_statement_quotes_its_values() -> None:
    assert statement("a'b", "c\\d") == r"SELECT pg_notify(E'a''b', E'c\\d')"


class Refusing(DirectConnection):
    """A connection whose end is noticed when a statement is sent."""

    def _send(self, sql: bytes) -> None:
        self._fail(ConnectionResetError("reset by peer"))


async def test_a_loss_that_is_noticed_while_sending_is_not_a_cancellation() -> None:
    with pytest.raises(ConnectionResetError):
        await Refusing(lambda event: None).query("select 1")
