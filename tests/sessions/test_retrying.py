"""An event that a handler can never take, and one that it takes at the second attempt."""

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


class Flaky:
    """A handler that fails so many times, and a place for what it never takes."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.times: list[float] = []
        self.put_aside: list[tuple[Incoming, str]] = []

    def __call__(self, event: Incoming) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if len(self.times) <= self.failures:
            raise ValueError(f"attempt {len(self.times)}")

    async def aside(self, event: Incoming, error: Exception) -> None:
        await asyncio.sleep(0)
        self.put_aside.append((event, str(error)))


def in_virtual_time(scenario: Callable[[Sim], Coroutine[Any, Any, None]]) -> None:
    run_one(scenario, 0, drift=False).result()


def test_what_passes_is_tried_again_with_growing_pauses() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = Flaky(failures=3)
        handle = retrying(flaky, dead_letter=flaky.aside, backoff=Backoff(1.0, 10.0))
        began = sim.now
        await handle(EVENT)
        assert [time - began for time in flaky.times] == [0.0, 1.0, 3.0, 7.0]
        assert not flaky.put_aside


def test_each_event_has_attempts_of_its_own() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = Flaky(failures=3)
        handle = retrying(flaky, attempts=2, dead_letter=flaky.aside, backoff=Backoff(1.0, 10.0))
        began = sim.now
        for _ in range(2):
            await handle(EVENT)
        assert [time - began for time in flaky.times] == [0.0, 1.0, 1.0, 2.0]
        assert flaky.put_aside == [(EVENT, "attempt 2")]


def test_without_dead_letters_the_last_error_is_the_handlers_own() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        with pytest.raises(ValueError, match="attempt 3"):
            await retrying(Flaky(failures=9), attempts=3)(EVENT)


def test_whoever_takes_its_place_does_not_wait_for_the_pause() -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        flaky = Flaky(failures=9)
        handle = retrying(flaky, dead_letter=flaky.aside, backoff=Backoff(60.0, 60.0))
        task = asyncio.ensure_future(handle(EVENT))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not flaky.put_aside


def test_no_attempt_at_all_is_refused() -> None:
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


async def test_a_poisoned_message_costs_neither_the_link_nor_the_others(
    sessions: Sessions, broker: Mosquitto
) -> None:
    heard: list[bytes] = []
    put_aside: list[bytes] = []

    def handle(event: Incoming) -> None:
        if isinstance(event.data, Msg):
            heard.append(event.data.content)
            if event.data.content == b"1":
                raise ValueError("never")

    def aside(event: Incoming, error: Exception) -> None:
        put_aside.append(event.data.content)

    careful = retrying(handle, attempts=3, dead_letter=aside, backoff=Backoff(0.01, 0.01))
    bot = await sessions.connect("poisoned", Mqtt(broker.url()), on_event=careful)
    async with peer(broker) as client:
        for number in range(4):
            await client.publish("poisoned", b"%d" % number, qos=1)
        await until(lambda: heard[-1:] == [b"3"])
    assert heard == [b"0", b"1", b"1", b"1", b"2", b"3"]
    assert put_aside == [b"1"]
    assert bot.generation == 1
    assert bot.status()["handler_failures"] == 0
    # It was acknowledged: the broker has nothing more to send.
    await bot.disconnect()
    await bot.connect()
    async with peer(broker) as client:
        await client.publish("poisoned", b"4", qos=1)
        await until(lambda: heard[-1:] == [b"4"])
    assert len(heard) == 7
