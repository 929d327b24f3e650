"""Clients that resume at the same time share the reads of the history, and take turns."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.broker.serving import ACME, OTHER

from moored.broker import Broker, LiveEvent, MemorySource, SourceEvent, SourceGap
from moored.broker._events import StreamComment
from moored.broker._replays import READS

pytestmark = pytest.mark.pure


def event(number: int, tenant: str = ACME) -> SourceEvent:
    payload = json.dumps({"org_id": tenant, "number": number})
    return SourceEvent("orders", payload, tenant, str(number), number)


class Gated:
    """A source whose reads of the history wait until the test lets them go on."""

    def __init__(self, *kept: SourceEvent) -> None:
        self.kept = list(kept)
        self.live = asyncio.Queue[SourceEvent]()
        self.open = asyncio.Event()
        self.reads: list[tuple[str, int]] = []
        self.running = self.most = 0

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        yield SourceGap("it has begun", "100")
        while True:
            found = await self.live.get()
            self.kept.append(found)
            yield found

    def position(self, id: str) -> int:
        return int(id)

    async def read(self, after: Any, tenant: str, channels: Any, limit: int) -> list[SourceEvent]:
        self.reads.append((tenant, after))
        self.running += 1
        self.most = max(self.most, self.running)
        # What can be read is what was committed when the read begins.
        found = [each for each in self.kept if each.tenant == tenant and each.position > after]
        try:
            await self.open.wait()
        finally:
            self.running -= 1
        return found[:limit]


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_streams_of_one_tenant_and_position_share_a_read() -> None:
    source = Gated(event(1), event(2))
    async with Broker(source) as broker, AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(broker.subscribe(ACME, after="1")) for _ in range(50)
        ]
        waiting = [asyncio.create_task(stream.take()) for stream in opened]
        await turns()
        source.open.set()
        for items in await asyncio.gather(*waiting):
            assert [item.id for item in items if isinstance(item, LiveEvent)] == ["2"]
        assert len(source.reads) <= READS + 1, "the first, and one for all that came meanwhile"
        assert broker.statistics().replayed == 50


async def test_stream_never_waits_for_a_read_that_began_before_it_was_registered() -> None:
    """Such a read does not see an event that was handed out in between."""
    source = Gated()
    async with (
        asyncio.timeout(30),
        Broker(source) as broker,
        broker.subscribe(ACME, after="100") as first,
    ):
        taking = asyncio.create_task(first.take())
        await turns()
        source.live.put_nowait(event(101))
        await turns()
        async with broker.subscribe(ACME, after="100") as second:
            late = asyncio.create_task(second.take())
            await turns()
            source.open.set()
            for items in (await taking, await late):
                assert [item.id for item in items if isinstance(item, LiveEvent)] == ["101"]


async def test_few_reads_run_at_a_time_and_each_tenant_gets_its_turn() -> None:
    source = Gated()
    async with Broker(source) as broker, AsyncExitStack() as stack:
        tasks = []
        for number in range(30):
            stream = await stack.enter_async_context(broker.subscribe(ACME, after=str(number)))
            tasks.append(asyncio.create_task(stream.take()))
        source.kept.append(event(8, OTHER))
        other = await stack.enter_async_context(broker.subscribe(OTHER, after="7"))
        tasks.append(asyncio.create_task(other.take()))
        await turns()
        assert source.reads == [(ACME, number) for number in range(READS)]
        source.open.set()
        async with asyncio.timeout(30):
            await tasks[-1]
        assert source.most == READS
        assert source.reads.index((OTHER, 7)) <= READS + 2, (
            "not after all reads of the other tenant"
        )
        for task in tasks:
            task.cancel()


async def test_read_ends_when_no_stream_waits_for_it_any_more() -> None:
    source = Gated()
    async with Broker(source) as broker, asyncio.timeout(30):
        for _ in range(2):
            async with AsyncExitStack() as stack:
                for number in range(5):
                    subscribed = broker.subscribe(ACME, after=str(number))
                    stream = await stack.enter_async_context(subscribed)
                    task = asyncio.create_task(stream.take())
                    stack.callback(task.cancel)
                await turns()
                assert source.running == READS
            await turns()
            assert source.running == 0
        assert len(source.reads) == 2 * READS, "those that were queued never began"


async def test_read_that_takes_too_long_is_cancelled_and_comes_after_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.broker._replays.LIMIT", 0.05)

    class Slow(Gated):
        async def read(
            self, after: Any, tenant: str, channels: Any, limit: int
        ) -> list[SourceEvent]:
            slow = tenant == OTHER and sum(each == OTHER for each, _ in self.reads) < 2 * READS
            self.open = asyncio.Event()
            if not slow:
                self.open.set()
            return await super().read(after, tenant, channels, limit)

    source = Slow(event(9), event(8, OTHER))
    async with Broker(source) as broker, AsyncExitStack() as stack, asyncio.timeout(30):
        slow = [
            await stack.enter_async_context(broker.subscribe(OTHER, after=str(number)))
            for number in range(READS)
        ]
        waiting = [asyncio.create_task(stream.take()) for stream in slow]
        await turns()
        assert source.running == READS
        other = await stack.enter_async_context(broker.subscribe(ACME, after="0"))
        await anext(other)
        assert not any(task.done() for task in waiting), "the slow reads gave up their places"
        for items in await asyncio.gather(*waiting):
            assert [item.id for item in items if isinstance(item, LiveEvent)] == ["8"]
        assert source.most == READS


async def test_broker_that_stops_waits_for_the_end_of_its_reads() -> None:
    source = Gated()
    async with Broker(source) as broker, broker.subscribe(ACME, after="1") as stream:
        taking = asyncio.create_task(stream.take())
        await turns()
        assert source.running == 1
        await broker.__aexit__()
        assert source.running == 0
        assert await taking == []
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_stream_sends_comments_while_its_history_is_read() -> None:
    source = Gated(event(1))
    async with Broker(source) as broker, broker.subscribe(ACME, after="0") as stream:
        for _ in range(3):
            taking = asyncio.create_task(stream.take())
            await turns()
            broker.keepalive(stream)
            assert await taking == [StreamComment("")], "the id would leave the event out"
        assert len(source.reads) == 1, "the stream keeps its place"
        source.open.set()
        found = await anext(stream)
        assert isinstance(found, LiveEvent)


async def test_a_broken_read_fails_for_all_that_wait_for_it_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.broker._replays.RETRY", (0.01, 0.01))

    class Broken(Gated):
        async def read(self, *arguments: Any) -> list[SourceEvent]:
            await asyncio.sleep(0)
            if len(self.reads) < 2:
                self.reads.append(("", 0))
                raise ConnectionError("the server is down")
            return await super().read(*arguments)

    source = Broken(event(1))
    source.open.set()
    async with Broker(source) as broker, AsyncExitStack() as stack, asyncio.timeout(30):
        for _ in range(3):
            stream = await stack.enter_async_context(broker.subscribe(ACME, after="0"))
            found = await anext(stream)
            assert isinstance(found, LiveEvent)


async def test_idle_stream_sends_the_id_of_the_last_event_of_any_tenant() -> None:
    source = Gated()
    source.open.set()
    async with Broker(source) as broker, broker.subscribe(ACME) as stream:
        source.live.put_nowait(event(101, OTHER))
        while broker.statistics().events < 1:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        broker.keepalive(stream)
        assert await stream.take() == [StreamComment("101")]
        assert b"id: 101" in StreamComment("101").sse
        # On another node, which is ahead of this one, the client has come to 105.
        async with broker.subscribe(ACME, after="105") as ahead:
            taking = asyncio.create_task(ahead.take())
            await turns()
            broker.keepalive(ahead)
            assert await taking == [StreamComment("")], "an older id would repeat events"


async def test_drained_stream_ends_with_the_id_to_resume_after() -> None:
    source = MemorySource()
    async with Broker(source) as broker, broker.subscribe(ACME) as stream:
        source.publish("orders", json.dumps({"org_id": OTHER}))
        while broker.statistics().events < 1:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        before = stream.id
        await broker.drain(over=0)
        assert [item async for item in stream] == []
        assert stream.id != before
        assert Counter(stream.id)["-"] == 1
