"""Sessions over ejabberd: MQTT 5 as another broker understands it."""

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
    """A profile that no other test has."""
    return f"p{uuid4().hex[:12]}"


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(backoff=Backoff(0.01, 0.1)) as opened:
        yield opened


def speaks(ejabberd: Ejabberd, name: str, scheme: str = "mqtt", **options: Any) -> Mqtt:
    """The protocol of an account, with the topics that are open to it."""
    topics = {"topic": "open/{recipient}", "subscribe": ["open/{profile}"], **options}
    return Mqtt(ejabberd.url(name, scheme), **topics)


def contents(heard: list[Incoming]) -> list[object]:
    return [event.data.content for event in heard if isinstance(event.data, Msg)]


@pytest.mark.every_loop
@pytest.mark.parametrize("scheme", ["mqtt", "ws"])
async def test_sends_are_confirmed_and_arrive_in_order(
    sessions: Sessions, ejabberd: Ejabberd, name: str, scheme: str
) -> None:
    alice = await sessions.connect(name, speaks(ejabberd, name, scheme))
    heard = collect(alice)
    for number in range(SENDS):
        await alice.send(name, b"%d" % number)
    await until(lambda: len(contents(heard)) == SENDS)
    assert contents(heard) == [b"%d" % number for number in range(SENDS)]


async def test_a_link_that_is_cut_resumes_and_nothing_is_lost(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    async with FaultProxy("127.0.0.1", ejabberd.port) as proxy:
        uri = ejabberd.url(name).replace(f":{ejabberd.port}", f":{proxy.port}")
        protocol = Mqtt(uri, topic="open/{recipient}", subscribe="open/{profile}")
        alice = await sessions.connect(name, protocol)
        heard = collect(alice)
        for number in range(SENDS):
            if number % 10 == 5:
                proxy.reset()
            outcome = await alice.send(name, b"%d" % number, hold=True, outcome=True)
            # (A send whose links are cut twice is put aside; here each link lives for ten.)
            assert isinstance(outcome, Acked), outcome
        wanted = {b"%d" % number for number in range(SENDS)}
        await until(lambda: set(contents(heard)) == wanted)
        assert alice.status()["reconnects"] >= SENDS // 10


async def test_a_topic_without_permission_is_rejected(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, speaks(ejabberd, name, topic="{recipient}"))
    outcome = await alice.send("forbidden", b"x", outcome=True)
    assert isinstance(outcome, Rejected)
    assert outcome.reason == "Publishing to this topic is forbidden by service policy"
    assert isinstance(await alice.send(f"open/{name}", b"after"), Acked)


async def test_a_subscription_without_permission_is_an_event(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(
        name, speaks(ejabberd, name, subscribe=["open/{profile}", "secret"])
    )
    heard = collect(alice)
    await until(lambda: any(event.type == "subscription_refused" for event in heard))
    [refused] = [one.data for one in heard if isinstance(one.data, SubscriptionRefused)]
    assert (refused.topic, refused.code) == ("secret", 0x8F)
    assert isinstance(await alice.send(name, b"x"), Acked)


async def test_a_large_message_does_not_take_the_account_down(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, speaks(ejabberd, name, max_packet_size=1000))
    bob = await sessions.connect(f"{name}-bob", speaks(ejabberd, f"{name}-bob"))
    heard = collect(alice)
    await bob.send(name, bytes(5000))
    await bob.send(name, b"small")
    await until(lambda: contents(heard) == [b"small"])
    assert isinstance(await alice.send("anybody", b"x"), Acked)
    # The broker may drop it, as the standard wants; if it does not, it is set aside.
    asides = [event for event in heard if isinstance(event.data, SetAside)]
    assert alice.status()["messages_set_aside"] == len(asides) <= 1
    assert alice.generation == 1


async def test_filters_and_properties_and_retained_messages(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    alice = await sessions.connect(name, speaks(ejabberd, name, subscribe=()))
    rich = Message("grüße", retain=True, content_type="text/plain", user_properties=(("a", "b"),))
    await alice.send(f"{name}/kept", rich)
    heard = collect(alice)
    await alice.subscribe(f"open/{name}/+")
    await until(lambda: contents(heard))
    [msg] = [event.data for event in heard if isinstance(event.data, Msg)]
    assert msg.type == "text"
    assert msg.extra["content_type"] == "text/plain"
    assert ("a", "b") in msg.extra["user_property"]
    await alice.unsubscribe(f"open/{name}/+")
    await alice.send(f"{name}/more", b"nobody hears it")
    await alice.disconnect()
    await alice.connect()
    await alice.send(f"{name}/more", b"nor this")
    assert len(contents(heard)) == 1


async def test_a_second_link_takes_over(sessions: Sessions, ejabberd: Ejabberd, name: str) -> None:
    protocol = speaks(ejabberd, name)
    alice = await sessions.connect(name, protocol)
    async with Sessions() as others:
        await others.connect(name, protocol)
        await until(lambda: alice.state == "offline/refused")
        assert alice.status()["kind"] == "taken over"


async def test_a_user_without_a_host_is_refused(
    sessions: Sessions, ejabberd: Ejabberd, name: str
) -> None:
    with pytest.raises(NotConnected, match="not authorized"):
        await sessions.connect(name, Mqtt(f"mqtt://127.0.0.1:{ejabberd.port}"))
