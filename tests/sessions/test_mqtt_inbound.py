"""Messages from a real broker that a handler does not handle: they come again, and others too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.peers import peer
from tests.sessions.support import until

from holdfast.kernel import Backoff
from holdfast.sessions import Event, Msg, Sessions
from holdfast.sessions.mqtt import Mqtt

#: More than may be unacknowledged at once, so that a lost acknowledgement is felt.
WINDOW, MESSAGES = 4, 12


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    with Mosquitto(require_server("mosquitto")) as server:
        yield server


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(backoff=Backoff(0.01, 0.1, jitter="full")) as opened:
        yield opened


class Log:
    """What a handler got, and when it fails or waits."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.fails_at: bytes | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, event: Event) -> None:
        if isinstance(event.data, Msg):
            self.heard.append(event.data.content)
            await self.may_go_on.wait()
            if event.data.content == self.fails_at:
                self.fails_at = None
                raise ValueError("once")


async def test_what_a_handler_failed_at_comes_again_and_so_does_the_rest(
    sessions: Sessions, broker: Mosquitto
) -> None:
    log = Log()
    log.fails_at = b"0"
    bot = await sessions.connect(
        "failing", Mqtt(broker.url(), receive_maximum=WINDOW), on_event=log
    )
    async with peer(broker) as client:
        for number in range(MESSAGES):
            await client.publish("failing", b"%d" % number, qos=1)
        await until(lambda: log.heard[-1:] == [b"%d" % (MESSAGES - 1)])
        assert log.heard.count(b"0") == 2
        # It is as it was before: nothing is held up any more.
        for number in range(MESSAGES, 3 * MESSAGES):
            await client.publish("failing", b"%d" % number, qos=1)
        await until(lambda: log.heard[-1:] == [b"%d" % (3 * MESSAGES - 1)])
    assert set(log.heard) == {b"%d" % number for number in range(3 * MESSAGES)}
    assert bot.status()["handler_failures"] == 1
    assert bot.generation == 2


async def test_a_backlog_larger_than_the_window_is_taken_after_a_loss(
    sessions: Sessions, broker: Mosquitto
) -> None:
    # Mosquitto does not count what it sends again, and exceeds our receive maximum.
    log = Log()
    protocol = Mqtt(broker.url(), receive_maximum=WINDOW)
    bot = await sessions.connect("backlog", protocol, on_event=log)
    log.may_go_on.clear()
    async with peer(broker) as client:
        for number in range(MESSAGES):
            await client.publish("backlog", b"%d" % number, qos=1)
    await until(lambda: log.heard)
    await bot.disconnect()
    log.may_go_on.set()
    await bot.connect()
    await until(lambda: log.heard[-1:] == [b"%d" % (MESSAGES - 1)])
    await until(lambda: not bot.status()["events_waiting"])
    assert bot.state == "online"
    assert "rules" not in bot.status()["reason"]
    assert set(log.heard) == {b"%d" % number for number in range(MESSAGES)}


async def test_another_handler_gets_what_the_last_one_had_in_hand(
    sessions: Sessions, broker: Mosquitto
) -> None:
    first, second = Log(), Log()
    first.may_go_on.clear()
    bot = await sessions.connect("replaced", Mqtt(broker.url()), on_event=first)
    async with peer(broker) as client:
        await client.publish("replaced", b"1", qos=1)
        await until(lambda: first.heard)
        bot.attach(second)
        await until(lambda: second.heard == [b"1"])
        await client.publish("replaced", b"2", qos=1)
        await until(lambda: second.heard == [b"1", b"2"])
    assert first.heard == [b"1"]
    assert bot.generation == 1
