"""No event reaches another tenant: random subscribers and odd payloads, against known tenants."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.broker import Broker, LiveEvent, LiveStream, MemorySource, SourceEvent
from moored.broker._audience import Audience, StreamBuffer
from moored.broker._tenants import Tenants
from moored.testing import Mutant, mutant

pytestmark = pytest.mark.pure

TENANTS = [str(uuid.UUID(int=number)) for number in range(6)]
CHANNELS = ["orders", "refunds"]
tenants = st.sampled_from(TENANTS)
odd = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(tenants),
    st.just({"org_id": TENANTS[1]}),
)


def spellings(tenant: str) -> st.SearchStrategy[str]:
    return st.sampled_from([tenant, tenant.upper(), tenant.replace("-", "")])


@st.composite
def events(draw: Any) -> tuple[SourceEvent, str | None]:
    """An event, and the one tenant that may get it."""
    tenant: str = draw(tenants)
    channel = draw(st.sampled_from([*CHANNELS, "secrets"]))
    body: dict[str, Any] = {"org_id": draw(spellings(tenant)), "more": draw(odd)}
    kind = draw(st.sampled_from(["plain", "column", "odd", "absent", "twice", "broken", "huge"]))
    if kind == "column":
        text = draw(st.sampled_from([json.dumps(body), json.dumps({"more": body}), "no JSON"]))
        return SourceEvent(channel, text, tenant), tenant
    if kind == "odd":
        return SourceEvent(channel, json.dumps({**body, "org_id": draw(odd)})), None
    if kind == "absent":
        return SourceEvent(channel, json.dumps({"nested": body})), None
    if kind == "twice":
        other = draw(tenants)
        return SourceEvent(channel, f'{{"org_id": "{tenant}", "org_id": "{other}"}}'), None
    if kind == "broken":
        return SourceEvent(channel, json.dumps(body)[:-1]), None
    if kind == "huge":
        body["more"] = "x" * 20_000
    return SourceEvent(channel, json.dumps(body)), tenant


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("subscribe"),
            tenants,
            st.none() | st.sets(st.sampled_from(CHANNELS), min_size=1),
        ),
        st.tuples(st.just("leave"), st.integers(0, 20), st.none()),
        st.tuples(st.just("publish"), events(), st.none()),
    ),
    max_size=60,
)


def check(broker: Broker, script: list[Any]) -> None:
    """Run steps, and compare what each subscriber gets with what it must get."""
    expected: dict[LiveStream, list[str]] = {}
    for step, first, second in script:
        if step == "subscribe":
            expected[broker.open(first, second)] = []
        elif step == "leave" and expected:
            stream = list(expected)[first % len(expected)]
            broker.close(stream)
            verify(stream, expected.pop(stream))
        elif step == "publish":
            event, tenant = first
            broker._publish(event)
            for stream, found in expected.items():
                buffer = stream.subscriber
                known = broker.channels is None or event.channel in broker.channels
                if known and buffer.tenant == tenant and buffer.gets(event.channel):
                    found.append(event.payload)
    for stream, found in expected.items():
        verify(stream, found)
        broker.close(stream)


def verify(stream: LiveStream, expected: list[str]) -> None:
    items = stream.subscriber.take()
    assert [item.payload for item in items if isinstance(item, LiveEvent)] == expected


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([CHANNELS, None]), steps)
def test_subscriber_gets_exactly_the_events_of_its_tenant_and_channels(
    channels: Any, script: list[Any]
) -> None:
    check(running(channels), script)


def running(channels: Any = CHANNELS) -> Broker:
    """A broker that accepts subscribers without a running source."""
    broker = Broker(MemorySource(), channels=channels, buffer=1000, buffer_bytes=10**9)
    broker._supervisor.state = "running"
    return broker


def _everybody(self: Audience, tenant: str, channel: str) -> Any:
    return iter([each for each in self._all if each.gets(channel)])


def _first_of_two(self: Tenants, event: SourceEvent) -> Any:
    try:
        return json.loads(event.payload)["org_id"]
    except (ValueError, LookupError, TypeError):
        return event.tenant


def _any_channel(self: StreamBuffer, event: LiveEvent) -> str:
    self._items.append(
        LiveEvent(event.channel, "of another", event.tenant, event.id, event.position)
    )
    return ""


SCRIPT = [
    ("subscribe", TENANTS[0], {"orders"}),
    ("subscribe", TENANTS[1], {"orders"}),
    ("publish", (SourceEvent("orders", json.dumps({"org_id": TENANTS[1]})), TENANTS[1]), None),
    (
        "publish",
        (SourceEvent("orders", f'{{"org_id": "{TENANTS[0]}", "org_id": "{TENANTS[1]}"}}'), None),
        None,
    ),
]


@pytest.mark.parametrize(
    "planted",
    [
        mutant(Audience, "hearers", _everybody, name="index by channel only"),
        mutant(Tenants, "_named", _first_of_two, name="a tenant that is named twice"),
        mutant(StreamBuffer, "push", _any_channel, name="another event in the buffer"),
    ],
    ids=lambda planted: planted.name,
)
def test_a_planted_leak_is_caught(planted: Mutant) -> None:
    check(running(), SCRIPT)
    with planted, pytest.raises(AssertionError):
        check(running(), SCRIPT)
