"""Event streams of browsers: bounded, counted, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from moored.service._browser_streams import COMMENT, BrowserStream, BrowserStreams, message

pytestmark = pytest.mark.pure


async def everything(client: BrowserStream) -> bytes:
    return b"".join([chunk async for chunk in client.stream(heartbeat=30)])


def joined(streams: BrowserStreams) -> BrowserStream:
    client = streams.join()
    assert client is not None
    return client


def test_a_message_is_a_server_sent_event() -> None:
    assert message("state", "{}") == b"event: state\ndata: {}\n\n"
    assert message("event", "{}", number=7) == b"event: event\nid: 7\ndata: {}\n\n"


async def test_events_come_in_order_and_the_stream_ends_at_close() -> None:
    streams = BrowserStreams()
    client = joined(streams)
    for number in range(5):
        streams.publish(b"%d" % number)
    streams.close()
    assert await everything(client) == b"01234"


async def test_a_slow_reader_loses_the_oldest_events_and_gets_their_number() -> None:
    streams = BrowserStreams(size=3)
    slow, quick = joined(streams), joined(streams)
    for number in range(5):
        streams.publish(b"%d" % number)
        quick.take()
    assert slow.take() == [message("dropped", '{"count":2}'), b"2", b"3", b"4"]
    assert slow.take() == []
    assert streams.statistics() == (2, 2, 0)
    streams.leave(slow)
    assert streams.statistics() == (1, 2, 0)  # what is lost stays counted
    streams.leave(slow)
    assert streams.statistics() == (1, 2, 0)


async def test_only_the_newest_state_is_sent_and_none_is_a_loss() -> None:
    streams = BrowserStreams(size=1)
    client = joined(streams)
    for number in range(5):
        client.give_state(b"state %d" % number)
    streams.publish(b"event")
    assert client.take() == [b"state 4", b"event"]
    assert streams.statistics().dropped == 0


async def test_a_reader_that_waits_is_woken() -> None:
    streams = BrowserStreams()
    stream = joined(streams).stream(heartbeat=30)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    streams.publish(b"news")
    assert await waiting == b"news"
    await closed(stream)


async def test_an_idle_stream_gets_a_comment_as_heartbeat() -> None:
    stream = joined(BrowserStreams()).stream(heartbeat=0.001)
    assert [await anext(stream), await anext(stream)] == [COMMENT, COMMENT]
    await closed(stream)


async def test_streams_over_the_limit_are_refused_and_counted() -> None:
    streams = BrowserStreams(limit=2)
    first, _ = joined(streams), joined(streams)
    assert streams.join() is None
    streams.leave(first)
    joined(streams)
    assert streams.statistics().refused == 1


async def test_no_stream_is_accepted_between_close_and_open() -> None:
    streams = BrowserStreams()
    streams.close()
    assert streams.join() is None
    streams.open()
    assert streams.join() is not None


async def closed(stream: AsyncIterator[bytes]) -> None:
    await stream.aclose()  # type: ignore[attr-defined]
