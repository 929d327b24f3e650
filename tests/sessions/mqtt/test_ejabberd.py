"""Sessions over ejabberd, a second implementation of MQTT 5."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from tests.sessions.ejabberd import Ejabberd
from tests.sessions.support import collect, until

from moored.kernel import Backoff
from moored.sessions import Acked, Incoming, Msg, NotConnected, Rejected, Sessions, SetAside
from moored.sessions.mqtt import Message, Mqtt, SubscriptionRefused
from moored.testing import FaultProxy

SENDS = 50


@pytest.fixture
def name() -> str:
    """A profile that no other test uses."""
    return f"p{uuid4().hex[:12]}"


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(backoff=Backoff(0.01, 0.1)) as opened:
        yield opened


def protocol_for(ejabberd: Ejabberd, name: str, scheme: str = "mqtt", **options: Any) -> Mqtt:
    """Return the protocol of an account, with the topics that it may use."""
    topics = {"topic": "open/{recipient}", "subscribe": ["open/{profile}"], **options}
    return Mqtt(ejabberd.url(name, scheme), **topics)


def contents(received: list[Incoming]) -> list[object]:
    return [event.data.content for event in received if isinstance(event.data, Msg)]


@pytest.mark.every_loop
@pytest.mark.parametrize("scheme", ["mqtt", "ws"])
async def test_sends_are_confirmed_and_arrive_in_order(
    sessions: Sessions, ejabberd: Ejabberd, name: str, scheme: str
) -> None:
    alice = await sessions.connect(name, protocol_for(ejabberd, name, scheme))
    received = collect(alice)
    for number in range(SENDS):
        await alice.send(name, b"%d" % number)
    await until(lambda: len(contents(received)) == SENDS)
    assert contents(received) == [b"%d" % number for number in range(SENDS)]


async def test_cut_link_resumes_and_no_message_is_lost(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    async with FaultProxy("127.0.0.1", ejabberd.port) as proxy:
        uri = ejabberd.url(name).replace(f":{ejabberd.port}", f":{proxy.port}")
        protocol = Mqtt(uri, topic="open/{recipient}", subscribe="open/{profile}")
        alice = await sessions.connect(name, protocol)
        received = collect(alice)
        for number in range(SENDS):
            if number % 10 == 5:
                proxy.reset()
            outcome = await alice.send(name, b"%d" % number, hold=True, outcome=True)
            # (A send that loses two links is given up; here, each link lasts for ten sends.)
            assert isinstance(outcome, Acked), outcome
        wanted = {b"%d" % number for number in range(SENDS)}
        await until(lambda: set(contents(received)) == wanted)
        assert alice.status()["reconnects"] >= SENDS // 10


async def test_send_to_a_forbidden_topic_is_rejected(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, protocol_for(ejabberd, name, topic="{recipient}"))
    outcome = await alice.send("forbidden", b"x", outcome=True)
    assert isinstance(outcome, Rejected)
    assert outcome.reason == "Publishing to this topic is forbidden by service policy"
    assert isinstance(await alice.send(f"open/{name}", b"after"), Acked)


async def test_forbidden_subscription_is_an_event(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(
        name, protocol_for(ejabberd, name, subscribe=["open/{profile}", "secret"])
    )
    received = collect(alice)
    await until(lambda: any(event.type == "subscription_refused" for event in received))
    [refused] = [one.data for one in received if isinstance(one.data, SubscriptionRefused)]
    assert (refused.topic, refused.code) == ("secret", 0x8F)
    assert isinstance(await alice.send(name, b"x"), Acked)


async def test_oversized_message_does_not_end_the_link(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, protocol_for(ejabberd, name, max_packet_size=1000))
    bob = await sessions.connect(f"{name}-bob", protocol_for(ejabberd, f"{name}-bob"))
    received = collect(alice)
    await bob.send(name, bytes(5000))
    await bob.send(name, b"small")
    await until(lambda: contents(received) == [b"small"])
    assert isinstance(await alice.send("anybody", b"x"), Acked)
    # The broker may drop it, as the standard requires; otherwise it is set aside.
    asides = [event for event in received if isinstance(event.data, SetAside)]
    assert alice.status()["messages_set_aside"] == len(asides) <= 1
    assert alice.generation == 1


async def test_filters_properties_and_retained_messages_work(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, protocol_for(ejabberd, name, subscribe=()))
    rich = Message("grüße", retain=True, content_type="text/plain", user_properties=(("a", "b"),))
    await alice.send(f"{name}/kept", rich)
    received = collect(alice)
    await alice.subscribe(f"open/{name}/+")
    await until(lambda: contents(received))
    [msg] = [event.data for event in received if isinstance(event.data, Msg)]
    assert msg.type == "text"
    assert msg.extra["content_type"] == "text/plain"
    assert ("a", "b") in msg.extra["user_property"]
    await alice.unsubscribe(f"open/{name}/+")
    await alice.send(f"{name}/more", b"not subscribed")
    await alice.disconnect()
    await alice.connect()
    await alice.send(f"{name}/more", b"still not subscribed")
    assert len(contents(received)) == 1


async def test_second_link_takes_over(sessions: Sessions, ejabberd: Ejabberd, name: str) -> None:
    protocol = protocol_for(ejabberd, name)
    alice = await sessions.connect(name, protocol)
    async with Sessions() as others:
        await others.connect(name, protocol)
        await until(lambda: alice.state == "offline/refused")
        assert alice.status()["kind"] == "taken over"


async def test_user_without_a_host_is_refused(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    with pytest.raises(NotConnected, match="not authorized"):
        await sessions.connect(name, Mqtt(f"mqtt://127.0.0.1:{ejabberd.port}"))
