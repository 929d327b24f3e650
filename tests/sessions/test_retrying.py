"""`retrying()`: repeated attempts of a handler, and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.peers import peer
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Incoming, Msg, Sessions, retrying
from moored.sessions.mqtt import Mqtt
from moored.testing import Sim, run_one

EVENT = Incoming("messages_upsert", Msg("text", "hello"), "alice")


class FlakyHandler:
    """A handler that fails `failures` times, and a dead-letter function."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.times: list[float] = []
        self.dead_letters: list[tuple[Incoming, str]] = []

    def __call__(self, event: Incoming) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if len(self.times) <= self.failures:
            raise ValueError(f"attempt {len(self.times)}")

    async def dead_letter(self, event: Incoming, error: Exception) -> None:
        await asyncio.sleep(0)
        self.dead_letters.append((event, str(error)))


def in_virtual_time(scenario: Callable[[Sim], Coroutine[Any, Any, None]]) -> None:
    run_one(scenario, 0, drift=False).result()


def test_failing_handler_is_retried_with_growing_pauses() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = FlakyHandler(failures=3)
        handle = retrying(flaky, dead_letter=flaky.dead_letter, backoff=Backoff(1.0, 10.0))
        began = sim.now
        await handle(EVENT)
        assert [time - began for time in flaky.times] == [0.0, 1.0, 3.0, 7.0]
        assert not flaky.dead_letters


def test_each_event_has_its_own_attempts() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = FlakyHandler(failures=3)
        handle = retrying(
            flaky, attempts=2, dead_letter=flaky.dead_letter, backoff=Backoff(1.0, 10.0)
        )
        began = sim.now
        for _ in range(2):
            await handle(EVENT)
        assert [time - began for time in flaky.times] == [0.0, 1.0, 1.0, 2.0]
        assert flaky.dead_letters == [(EVENT, "attempt 2")]


def test_without_dead_letter_the_last_error_is_raised() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        with pytest.raises(ValueError, match="attempt 3"):
            await retrying(FlakyHandler(failures=9), attempts=3)(EVENT)


def test_cancellation_during_a_pause_is_immediate() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = FlakyHandler(failures=9)
        handle = retrying(flaky, dead_letter=flaky.dead_letter, backoff=Backoff(60.0, 60.0))
        task = asyncio.ensure_future(handle(EVENT))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not flaky.dead_letters


def test_zero_attempts_are_refused() -> None:
    with pytest.raises(ValueError, match="attempts=0 must be at least 1"):
        retrying(print, attempts=0)


# -- with a real broker ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[Mosquitto]:
    with Mosquitto(require_server("mosquitto")) as server:
        yield server


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(backoff=Backoff(0.01, 0.1, jitter="full")) as opened:
        yield opened


async def test_poison_message_costs_neither_the_link_nor_other_messages(
    sessions: Sessions, broker: Mosquitto
) -> None:
    received: list[bytes] = []
    dead_letters: list[bytes] = []

    def handle(event: Incoming) -> None:
        if isinstance(event.data, Msg):
            received.append(event.data.content)
            if event.data.content == b"1":
                raise ValueError("never")

    def dead_letter(event: Incoming, error: Exception) -> None:
        dead_letters.append(event.data.content)

    retried = retrying(handle, attempts=3, dead_letter=dead_letter, backoff=Backoff(0.01, 0.01))
    bot = await sessions.connect("poisoned", Mqtt(broker.url()), on_event=retried)
    async with peer(broker) as client:
        for number in range(4):
            await client.publish("poisoned", b"%d" % number, qos=1)
        await until(lambda: received[-1:] == [b"3"])
    assert received == [b"0", b"1", b"1", b"1", b"2", b"3"]
    assert dead_letters == [b"1"]
    assert bot.generation == 1
    assert bot.status()["handler_failures"] == 0
    # The poison message was acknowledged, so the broker does not redeliver it. Of the message that
    # was handled right before the disconnect, the acknowledgement may be late.
    await bot.disconnect()
    await bot.connect()
    async with peer(broker) as client:
        await client.publish("poisoned", b"4", qos=1)
        await until(lambda: received[-1:] == [b"4"])
    assert [received.count(b"%d" % number) for number in (0, 1, 2, 4)] == [1, 3, 1, 1]
