"""Many readers of one stream: bounded, counted, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from moored.service._hub import COMMENT, Client, Hub, message


async def everything(client: Client) -> bytes:
    return b"".join([chunk async for chunk in client.stream(heartbeat=30)])


def joined(hub: Hub) -> Client:
    client = hub.join()
    assert client is not None
    return client


def test_a_message_is_a_server_sent_event() -> None:
    assert message("state", "{}") == b"event: state\ndata: {}\n\n"
    assert message("event", "{}", number=7) == b"event: event\nid: 7\ndata: {}\n\n"


async def test_events_come_in_order_and_end_with_the_hub() -> None:
    hub = Hub()
    client = joined(hub)
    for number in range(5):
        hub.publish(b"%d" % number)
    hub.close()
    assert await everything(client) == b"01234"


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    hub = Hub(size=3)
    slow, quick = joined(hub), joined(hub)
    for number in range(5):
        hub.publish(b"%d" % number)
        quick.take()
    assert (slow.dropped, quick.dropped) == (2, 0)
    assert slow.take() == [message("dropped", '{"count":2}'), b"2", b"3", b"4"]
    assert slow.take() == []
    assert hub.statistics() == (2, 2, 0)
    hub.leave(slow)
    assert hub.statistics() == (1, 2, 0)  # what is lost stays counted
    hub.leave(slow)
    assert hub.statistics() == (1, 2, 0)


async def test_only_the_newest_state_is_sent_and_none_is_a_loss() -> None:
    hub = Hub(size=1)
    client = joined(hub)
    for number in range(5):
        hub.publish_state(b"state %d" % number)
    hub.publish(b"event")
    assert client.take() == [b"event", b"state 4"]
    assert client.dropped == 0


async def test_a_reader_that_waits_is_woken() -> None:
    hub = Hub()
    stream = joined(hub).stream(heartbeat=30)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    hub.publish(b"news")
    assert await waiting == b"news"
    await closed(stream)


async def test_a_quiet_stream_has_a_pulse() -> None:
    stream = joined(Hub()).stream(heartbeat=0.001)
    assert [await anext(stream), await anext(stream)] == [COMMENT, COMMENT]
    await closed(stream)


async def test_there_is_a_limit_and_who_is_refused_is_counted() -> None:
    hub = Hub(max_clients=2)
    first, _ = joined(hub), joined(hub)
    assert hub.join() is None
    hub.leave(first)
    joined(hub)
    assert hub.statistics().refused == 1
    assert repr(hub) == "<Hub: 2 of 2 streams, 0 events dropped>"


async def test_a_closed_hub_takes_nobody_until_it_opens() -> None:
    hub = Hub()
    hub.close()
    assert hub.join() is None
    hub.open()
    assert hub.join() is not None


async def closed(stream: AsyncIterator[bytes]) -> None:
    await stream.aclose()  # type: ignore[attr-defined]
