"""Subscriptions: at each link, at run time, and those that the broker refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import mqtt5
import pytest
from tests.servers import require_server
from tests.sessions.mosquitto import Mosquitto
from tests.sessions.mqtt.scripted import GRANTED, ScriptedBroker
from tests.sessions.peers import peer
from tests.sessions.support import collect, until

from moored.sessions import Msg, QueryFailed, Sessions, Unsupported
from moored.sessions.mqtt import Mqtt, SubscriptionRefused
from moored.testing.demo import Demo, DemoServer

NOT_AUTHORIZED = mqtt5.SubAckReasonCode.NOT_AUTHORIZED


def subscribed(scripted: ScriptedBroker) -> list[list[str]]:
    """Return the filters of each SUBSCRIBE."""
    packets = scripted.sent(mqtt5.SubscribePacket)
    return [[one.pattern for one in packet.topic_filters] for packet in packets]


def unsubscribed(scripted: ScriptedBroker) -> list[list[str]]:
    """Return the filters of each UNSUBSCRIBE."""
    return [packet.patterns for packet in scripted.sent(mqtt5.UnsubscribePacket)]


@pytest.mark.every_loop
async def test_every_link_subscribes_and_retained_messages_arrive_once(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    alice = await sessions.connect("alice", Mqtt(scripted.url, subscribe=["a", "b/#"]))
    scripted.cut()
    await until(lambda: len(scripted.links) == 2)
    await alice.online(10)
    assert subscribed(scripted) == [["a", "b/#"], ["a", "b/#"]]
    only_new = mqtt5.RetainHandling.SEND_IF_SUBSCRIPTION_NOT_EXISTS
    for packet in scripted.sent(mqtt5.SubscribePacket):
        assert all(one.retain_handling == only_new for one in packet.topic_filters)


async def test_broker_restored_from_a_snapshot_gets_all_subscriptions_again(
    sessions: Sessions,
) -> None:
    with Mosquitto(require_server("mosquitto"), persistence=True) as server:
        alice = await sessions.connect("alice", Mqtt(server.url(), subscribe=["old"]))
        await until(server.database.exists)
        await alice.stop()
        server.kill()
        snapshot = shutil.copy(server.database, server.directory / "snapshot")
        server.start()
        alice = await sessions.connect("alice", Mqtt(server.url(), subscribe=["old", "new"]))
        server.kill()
        shutil.copy(snapshot, server.database)
        server.start()
        await until(lambda: alice.generation > 1 and alice.state == "online")
        received = collect(alice)
        async with peer(server) as client:
            await client.publish("new", b"news", qos=1)
        await until(lambda: any(isinstance(event.data, Msg) for event in received))


async def test_removed_filter_is_unsubscribed_by_the_next_process(
    scripted: ScriptedBroker, tmp_path: Path
) -> None:
    for filters in (["a", "b", "c"], ["b"], ["b"]):
        async with Sessions(storage=tmp_path / "accounts.db") as sessions:
            await sessions.connect("alice", Mqtt(scripted.url, subscribe=filters))
    assert [sorted(each) for each in unsubscribed(scripted)] == [["a", "c"]]
    assert subscribed(scripted) == [["a", "b", "c"], ["b"], ["b"]]


async def test_nothing_is_unsubscribed_if_the_broker_keeps_no_session(
    scripted: ScriptedBroker, tmp_path: Path
) -> None:
    for filters in (["a"], ["b"]):
        async with Sessions(storage=tmp_path / "accounts.db") as sessions:
            await sessions.connect("alice", Mqtt(scripted.url, subscribe=filters, session_expiry=0))
    assert unsubscribed(scripted) == []


async def test_refused_subscription_is_an_event(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    scripted.on_filter = lambda pattern: NOT_AUTHORIZED if pattern == "secret/alice" else GRANTED
    alice = await sessions.connect("alice", Mqtt(scripted.url, subscribe=["a", "secret/{profile}"]))
    received = collect(alice)
    await until(lambda: any(one.type == "subscription_refused" for one in received))
    [event] = [one for one in received if one.type == "subscription_refused"]
    assert event.data == SubscriptionRefused("secret/alice", 0x87, "not authorized")
    assert alice.status()["unhandled"] == 1
    assert alice.state == "online"


@pytest.mark.every_loop
async def test_subscribe_and_unsubscribe_at_run_time_last_over_links(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    alice = await sessions.connect("alice", Mqtt(scripted.url, subscribe=["a", "b"]))
    await alice.subscribe("c/+")
    await alice.unsubscribe("a")
    scripted.cut()
    await until(lambda: len(scripted.links) == 2)
    await alice.online(10)
    assert subscribed(scripted) == [["a", "b"], ["c/+"], ["b", "c/+"]]
    assert unsubscribed(scripted) == [["a"]]


async def test_subscription_refused_at_run_time_raises(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    scripted.on_filter = lambda pattern: NOT_AUTHORIZED if pattern == "secret" else GRANTED
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    with pytest.raises(QueryFailed, match="not authorized"):
        await alice.subscribe("secret")
    scripted.cut()
    await until(lambda: len(scripted.links) == 2)
    await alice.online(10)
    assert subscribed(scripted) == [["alice"], ["secret"], ["alice"]]


@pytest.mark.parametrize(
    "bad", ["", "a/#/b", "a#", "a/b+", "a\0", "$share/a", "$share/+/b", "x" * 65536]
)
async def test_invalid_filter_is_refused_at_the_call(bad: str) -> None:
    with pytest.raises(ValueError, match="subscribe"):
        Mqtt("mqtt://broker", subscribe=bad)
    async with Sessions() as sessions:
        alice = await sessions.start("alice", Mqtt("mqtt://broker"), offline=True)
        with pytest.raises(ValueError, match="filter"):
            await alice.subscribe(bad)


async def test_protocol_without_topics_refuses_subscriptions(sessions: Sessions) -> None:
    alice = await sessions.start("alice", Demo(DemoServer()))
    with pytest.raises(Unsupported):
        await alice.subscribe("a")


async def test_messages_to_a_filter_added_at_run_time_arrive(
    sessions: Sessions,
) -> None:
    with Mosquitto(require_server("mosquitto")) as server:
        alice = await sessions.connect("alice", Mqtt(server.url()))
        received = collect(alice)

        def contents() -> list[bytes]:
            return [event.data.content for event in received if isinstance(event.data, Msg)]

        await alice.subscribe("news/#")
        async with peer(server) as client:
            await client.publish("news/today", b"1", qos=1)
            await until(lambda: contents() == [b"1"])
            await alice.unsubscribe("news/#")
            await client.publish("news/today", b"2", qos=1)
            await client.publish("alice", b"3", qos=1)
            await until(lambda: contents() == [b"1", b"3"])
