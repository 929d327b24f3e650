"""A replaced channel is closed once, after its calls or its grace, by its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moored.kernel import Clock, Recorder, awaited
from moored.rpc import ConnectionConfig
from moored.rpc._channel_pool import AioChannelPool, ChannelPool
from moored.rpc._endpoint import CLOSING, Act, Endpoint, Live, Order

from .handlers import eventually
from .harness import ADDRESS, AsyncHarness, FakeAioChannel, FakeChannel, Harness

both = pytest.mark.parametrize("aio", [False, True], ids=["Threads", "Aio"])


def replaced(grace: float = 30.0) -> tuple[Endpoint, Live]:
    """Return an endpoint whose first channel, with a call in flight, was replaced at time 10."""
    config = ConnectionConfig.from_uri(f"http://{ADDRESS}")
    endpoint = Endpoint(config, Clock.system(), Recorder(), grace=grace)
    (dial,) = endpoint.connect(0.0)
    endpoint.dialed(dial.attempt, FakeChannel(), ADDRESS, 0.0)
    live = endpoint.live
    assert live is not None
    live.calls.append(None)
    (dial,) = endpoint.renew("the program asks for it", 10.0)
    endpoint.dialed(dial.attempt, FakeChannel(), ADDRESS, 10.0)
    assert endpoint.old == [live]
    return endpoint, live


@pytest.mark.parametrize("grace", [30.0, 1.0])
def test_close_gives_the_calls_of_a_replaced_channel_their_full_time(grace: float) -> None:
    endpoint, live = replaced(grace)
    now = 10.0 + grace - 0.5
    endpoint.close("everything is closed", now)
    assert endpoint.next_at == now + CLOSING
    assert endpoint.due(now + CLOSING - 0.1) == []
    assert Order(Act.CLOSE, live=live) in endpoint.due(now + CLOSING)


def test_second_close_does_not_prolong_the_time_of_calls() -> None:
    endpoint, _ = replaced()
    endpoint.close("it was released", 20.0)
    assert endpoint.close("everything is closed", 21.0) == []
    assert endpoint.next_at == 20.0 + CLOSING


@pytest.mark.parametrize("call_first", [False, True])
def test_time_that_ends_with_the_last_call_closes_the_channel_once(call_first: bool) -> None:
    endpoint, live = replaced()
    endpoint.close("everything is closed", 20.0)
    live.leave()
    orders = endpoint.ended(live, 0.0) if call_first else []
    orders += endpoint.due(30.0)
    orders += endpoint.ended(live, 0.0)
    assert [each for each in orders if each.live is live] == [Order(Act.CLOSE, live=live)]


def test_review_that_ends_after_the_last_call_changes_nothing() -> None:
    endpoint, live = replaced()
    assert endpoint.due(40.0) == [Order(Act.REVIEW, live=live)]
    live.leave()
    assert endpoint.ended(live, 0.0) == [Order(Act.CLOSE, live=live)]
    assert endpoint.reviewed(live, False, 40.0) == []


def test_call_that_ends_in_a_forked_child_closes_no_inherited_channel() -> None:
    endpoint, live = replaced()
    endpoint.forked()
    live.leave()
    assert endpoint.ended(live, 0.0) == []


# -- in a manager ----------------------------------------------------------------------------------


def fake(aio: bool, *, connected: bool = True) -> FakeChannel:
    return (FakeAioChannel if aio else FakeChannel)(connected=connected)


@asynccontextmanager
async def opened(aio: bool, channel: Any) -> AsyncIterator[tuple[Any, Live]]:
    """Open a harness of one kind; its first generation, over this channel, has a call in flight."""
    harness: Any = (AsyncHarness if aio else Harness)()
    try:
        live = await awaited(harness.swap(channel))
        live.calls.append(None)
        yield harness, live
    finally:
        await awaited(harness.manager.close())


async def grace_ends(harness: Any, live: Live) -> None:
    """Let the grace of a replaced channel end, and wait until the manager has reviewed it."""
    harness.leap(31.0)
    now = harness.clock.monotonic()

    def reviewed() -> bool:
        return live.closed or live.until is None or live.until > now

    await asyncio.to_thread(eventually, reviewed)


@both
async def test_replaced_channel_is_closed_once_after_its_last_call(aio: bool) -> None:
    async with opened(aio, fake(aio)) as (harness, live):
        await awaited(harness.swap(fake(aio)))
        await grace_ends(harness, live)
        assert not live.closed, "its connection is alive"
        live.leave()
        await awaited(harness.wait_closed())
        assert live.channel.closed == 1
        harness.leap(31.0)
    assert live.channel.closed == 1


@both
async def test_calls_over_a_pool_are_not_cut_while_one_of_its_connections_is_up(aio: bool) -> None:
    for connected, closed in ([True, False], 0), ([False, False], 1):
        lanes = [fake(aio, connected=each) for each in connected]
        async with opened(aio, (AioChannelPool if aio else ChannelPool)(lanes)) as (harness, live):
            await awaited(harness.swap(fake(aio)))
            await grace_ends(harness, live)
            if closed:
                await awaited(harness.wait_closed())
            assert [each.closed for each in lanes] == [closed] * 2
            live.leave()
        assert [each.closed for each in lanes] == [1, 1]


@both
async def test_connection_with_a_call_in_flight_does_not_sleep(aio: bool) -> None:
    async with opened(aio, fake(aio)) as (harness, live):
        await awaited(harness.manager.release(harness.handler))
        for _ in range(3):
            harness.leap(100.0)
        assert harness.handler.generation == 1
        live.leave()
        for _ in range(2):
            harness.leap(100.0)
        await awaited(harness.wait_closed())
        assert harness.endpoint.resting
        assert live.channel.closed == 1
