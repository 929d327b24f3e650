"""The broker inside a process: buffers, policies, limits and what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.broker.serving import ACME, OTHER
from tests.leases.virtual import in_virtual_time

from moored.broker import (
    Broker,
    BrokerOff,
    LiveEvent,
    LiveStream,
    MemorySource,
    Skipped,
    SlowSubscriber,
    SourceEvent,
    SourceGap,
    StreamReset,
    TooManyStreams,
)
from moored.broker.prometheus import BrokerCollector
from moored.testing import Sim

pytestmark = pytest.mark.pure


def payload(number: int, tenant: str = ACME) -> str:
    return json.dumps({"org_id": tenant, "number": number})


async def published(broker: Broker, source: MemorySource, *events: str) -> None:
    """Publish events, and wait until the broker has them."""
    goal = broker.statistics().events + len(events)
    for each in events:
        source.publish("orders", each)
    while broker.statistics().events < goal:  # noqa: ASYNC110 - the broker has no event for it
        await asyncio.sleep(0)


async def taken(stream: LiveStream) -> list[Any]:
    """Return the numbers of the events, and the other items as they are."""
    return [
        json.loads(item.payload)["number"] if isinstance(item, LiveEvent) else item
        for item in await stream.take()
    ]


async def test_full_buffer_disconnects_and_the_client_resumes_without_loss() -> None:
    source = MemorySource()
    async with Broker(source, channels=["orders"], buffer=3) as broker:
        async with broker.subscribe(ACME) as stream:
            await published(broker, source, payload(1))
            first = await anext(stream)
            assert isinstance(first, LiveEvent)
            await published(broker, source, *map(payload, range(2, 7)))
            with pytest.raises(SlowSubscriber, match="buffer="):
                await anext(stream)
        async with broker.subscribe(ACME, after=first.id) as stream:
            assert await taken(stream) == [2, 3, 4, 5, 6]


async def test_full_buffer_drops_new_events_and_reports_their_number() -> None:
    source = MemorySource()
    async with Broker(source, channels=["orders"], buffer=2, slow="drop") as broker:
        async with broker.subscribe(ACME) as stream:
            await published(broker, source, *map(payload, range(1, 6)))
            assert await taken(stream) == [1, 2, Skipped(3)]
            await published(broker, source, payload(6))
            assert await taken(stream) == [6]
        assert broker.statistics().dropped == {"slow": 3}


async def test_full_buffer_keeps_the_latest_event_and_reports_the_others() -> None:
    source = MemorySource()
    broker = Broker(source, channels=["orders"], buffer=2, slow="latest")
    async with broker, broker.subscribe(ACME) as stream:
        await published(broker, source, *map(payload, range(1, 6)))
        assert await taken(stream) == [Skipped(4), 5]


async def test_full_buffer_keeps_a_reset() -> None:
    source = MemorySource()
    broker = Broker(source, channels=["orders"], buffer=2, slow="latest")
    async with broker, broker.subscribe(ACME) as stream:
        source.gap("events were lost")
        await published(broker, source, *map(payload, range(1, 6)))
        reset, *rest = await taken(stream)
        assert isinstance(reset, StreamReset)
        assert rest == [Skipped(4), 5]


async def test_buffer_is_bounded_in_bytes_but_takes_one_large_event() -> None:
    source = MemorySource()
    broker = Broker(source, channels=["orders"], buffer_bytes=100, slow="drop")
    async with broker, broker.subscribe(ACME) as stream:
        large = json.dumps({"org_id": ACME, "number": 1, "text": "x" * 500})
        await published(broker, source, large, payload(2))
        assert await taken(stream) == [1, Skipped(1)]


async def test_event_on_another_channel_or_without_a_tenant_is_dropped_and_counted() -> None:
    source = MemorySource()
    async with Broker(source, channels=["orders"]) as broker:
        async with broker.subscribe(ACME) as stream:
            source.publish("secrets", payload(1))
            await published(broker, source, "{}", "no JSON", payload(2, OTHER), payload(3))
            assert await taken(stream) == [3]
        dropped = {"unknown_channel": 1, "no_tenant": 1, "not_an_object": 1}
        assert broker.statistics().dropped == dropped


async def test_broker_without_channels_has_all_except_reserved_names() -> None:
    source = MemorySource()
    async with Broker(source) as broker:
        with pytest.raises(ValueError, match="not a channel of the broker: reset"):
            broker.open(ACME, ["reset"])
        async with broker.subscribe(ACME) as both, broker.subscribe(ACME, ["refunds"]) as one:
            source.publish("reset", payload(1))
            source.publish("refunds", payload(2))
            await published(broker, source, payload(3))
            assert (await taken(both), await taken(one)) == ([2, 3], [2])
        assert broker.statistics().dropped == {"unknown_channel": 1}


async def test_code_of_the_user_that_fails_for_a_payload_drops_only_that_event() -> None:
    source = MemorySource()
    broker = Broker(
        source,
        channels=["orders"],
        tenant=lambda event: json.loads(event.payload)["org_id"],
        canonical=str.lower,
    )
    async with broker, broker.subscribe("acme") as stream:
        odd = ["no JSON", "{}", '{"org_id": 7}', '{"org_id": ""}']
        await published(broker, source, *odd, payload(1, "ACME"))
        assert await taken(stream) == [1]
        assert broker.statistics().dropped == {"bad_tenant": 4}
        assert broker.up, "the source was not started again"


class Broken:
    """A history whose server is down for the first reads."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.reads = 0

    def position(self, id: str) -> int:
        return int(id)

    async def read(self, after: Any, tenant: str, channels: Any, limit: int) -> list[SourceEvent]:
        self.reads += 1
        if self.reads <= self.failures:
            raise ConnectionError("the server is down")
        foreign = SourceEvent("orders", payload(8, OTHER), None, "8", 8)
        own = SourceEvent("orders", payload(9), None, "9", 9)
        return [each for each in (foreign, own) if each.position > after]


async def test_stream_resumes_when_the_history_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moored.broker._replays.RETRY", (0.01, 0.01))
    broker = Broker(MemorySource(), replay=Broken(2), channels=["orders"])
    async with broker, broker.subscribe(ACME, after="7") as stream:
        found = await anext(stream)
        assert isinstance(found, LiveEvent)
        assert found.id == "9", "the event of another tenant is left out"


class WithHistory(Broken):
    """A source that reads earlier events itself, and yields one when it may go on."""

    position_of_event: Any = 10

    def __init__(self) -> None:
        super().__init__(0)
        self.goes_on = asyncio.Event()

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        if not self.goes_on.is_set():
            yield SourceGap("it has begun", "9")
            await self.goes_on.wait()
            yield SourceEvent("orders", payload(10), None, "10", self.position_of_event)
        yield SourceEvent("orders", payload(11), None, "11", 11)
        await asyncio.get_running_loop().create_future()


async def test_source_that_reads_earlier_events_is_the_history() -> None:
    source = WithHistory()
    broker = Broker(source, channels=["orders"])
    async with broker, broker.subscribe(ACME, after="7") as stream:
        assert await taken(stream) == [9]
        source.goes_on.set()
        assert (await taken(stream))[0] == 10


async def test_event_that_could_not_be_delivered_is_a_reset() -> None:
    source = WithHistory()
    source.position_of_event = "not comparable with those of the history"
    broker = Broker(source, replay=source, channels=["orders"])
    async with broker, broker.subscribe(ACME, after="9") as stream, asyncio.timeout(30):
        found = asyncio.ensure_future(anext(stream))
        while stream.subscriber.replaying:  # noqa: ASYNC110 - the stream has no event for it
            await asyncio.sleep(0)
        source.goes_on.set()
        assert isinstance(await found, StreamReset)
        assert await taken(stream) == [11], "the source goes on"


class Stuck(Broken):
    """A history whose server does not answer."""

    async def read(self, after: Any, tenant: str, channels: Any, limit: int) -> list[SourceEvent]:
        self.reads += 1
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("history", [Broken(1000), Stuck(0)])
async def test_drain_ends_a_stream_whose_history_cannot_be_read(history: Broken) -> None:
    broker = Broker(MemorySource(), replay=history, channels=["orders"])
    async with broker, broker.subscribe(ACME, after="7") as stream, asyncio.timeout(20):
        ended = asyncio.ensure_future(anext(stream, None))
        while not history.reads:  # noqa: ASYNC110 - the stream has no event for it
            await asyncio.sleep(0)
        await broker.drain(over=0)
        assert await ended is None


@in_virtual_time
async def test_drain_takes_no_longer_than_it_was_given(sim: Sim) -> None:
    loop = asyncio.get_running_loop()
    async with Broker(MemorySource()) as broker:
        for _ in range(199):
            broker.open(ACME)
        began = loop.time()
        await broker.drain(over=1.0)
        assert loop.time() - began == pytest.approx(1.0, rel=0.05)


async def test_index_keeps_no_channels_of_streams_that_have_ended() -> None:
    async with Broker(MemorySource()) as broker, broker.subscribe(ACME, ["orders"]):
        async with broker.subscribe(ACME, ["orders", "refunds"]):
            pass
        assert [*broker._audience._index[ACME]] == ["orders"]


async def test_limits_refuse_streams() -> None:
    async with Broker(MemorySource(), channels=["orders"], max_streams=2) as broker:
        with pytest.raises(ValueError, match="at most 200"):
            broker.open("x" * 201)
        with pytest.raises(ValueError, match="secrets"):
            broker.open(ACME, ["secrets"])
        streams = [broker.open(ACME.upper()), broker.open(OTHER)]
        with pytest.raises(TooManyStreams, match="max_streams"):
            broker.open(ACME)
        assert repr(streams[0]) == f"<LiveStream of {ACME}: live, 0 buffered>"
        for stream in streams:
            broker.close(stream)
            broker.close(stream)  # harmless
        assert broker.statistics().subscribers == 0


async def test_broker_that_is_off_or_stopped_refuses_streams() -> None:
    async with Broker(None, channels=["orders"]) as off:
        assert off.status()["state"] == "off"
        with pytest.raises(BrokerOff, match="no source"):
            off.open(ACME)
    broker = Broker(MemorySource(), channels=["orders"])
    with pytest.raises(BrokerOff, match="not started"):
        broker.open(ACME)
    async with broker, broker.subscribe(ACME) as stream:
        await broker.drain(over=0)
        assert [item async for item in stream] == []
        with pytest.raises(BrokerOff, match="stopping"):
            broker.open(ACME)


class Failing:
    """A source that fails once, and then reports a gap."""

    def __init__(self) -> None:
        self.calls = 0
        self.subscribed = asyncio.Event()

    async def events(self) -> AsyncGenerator[SourceEvent | SourceGap]:
        self.calls += 1
        if self.calls == 1:
            yield SourceGap("it has begun")
            await self.subscribed.wait()
            yield SourceEvent("orders", payload(1))
            raise ConnectionError("the server has gone away")
        yield SourceGap("it was away")
        yield SourceEvent("orders", payload(2))
        await asyncio.get_running_loop().create_future()


async def test_streams_stay_open_while_the_source_fails(caplog: pytest.LogCaptureFixture) -> None:
    source = Failing()
    async with Broker(source, channels=["orders"]) as broker, broker.subscribe(ACME) as stream:
        source.subscribed.set()
        assert await taken(stream) == [1]
        found = [await anext(stream), await anext(stream)]
        assert isinstance(found[0], StreamReset)
        assert isinstance(found[1], LiveEvent)
        assert broker.statistics().resets == {"gap": 1}
    assert "the server has gone away" in caplog.text


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"buffer=0.*slow='wait'.*channel 'reset'"):
        Broker(None, channels=["reset"], buffer=0, slow="wait")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="comma"):
        Broker(None, channels=["orders,refunds"])


async def test_metrics_have_a_sample_for_each_counter() -> None:
    source = MemorySource()
    registry = CollectorRegistry()
    async with Broker(source, channels=["orders"]) as broker:
        registry.register(BrokerCollector(broker))
        async with broker.subscribe(ACME):
            await published(broker, source, payload(1), "{}")
            text = generate_latest(registry).decode()
    for line in (
        'moored_broker_subscribers{broker="broker"} 1.0',
        'moored_broker_delivered_total{broker="broker"} 1.0',
        'moored_broker_dropped_total{broker="broker",reason="no_tenant"} 1.0',
        'moored_broker_up{broker="broker"} 1.0',
    ):
        assert line in text
