"""Sends for which a broker closes the link, and the outcomes of those and of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import mqtt5
import pytest
from tests.sessions.mqtt.driver import outgoing
from tests.sessions.mqtt.peers import connack, feed, link, puback
from tests.sessions.mqtt.scripted import ScriptedBroker, acknowledged
from tests.sessions.support import until
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from moored.sessions import Acked, Sessions, Unknown
from moored.sessions._protocol import Confirmed, Greeting
from moored.sessions.mqtt import Mqtt
from moored.sessions.mqtt._dialogue import MqttDialogue
from moored.sessions.mqtt._memory import MqttMemory

pytestmark = pytest.mark.every_loop


def refuse_poison(packet: mqtt5.PublishPacket) -> bytes | None:
    return None if packet.payload == b"poison" else acknowledged(packet)


async def test_send_that_timed_out_is_not_written_again(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    scripted.on_publish = lambda packet: b"" if packet.payload == b"late" else acknowledged(packet)
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    assert isinstance(await alice.send("bob", b"late", outcome=True, timeout=0.05), Unknown)
    scripted.cut()
    await until(lambda: len(scripted.links) == 2)
    await alice.online(10)
    assert await alice.send("bob", b"after")
    assert scripted.payloads() == [b"late", b"after"]


async def test_send_that_ends_two_links_is_given_up(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    scripted.on_publish = refuse_poison
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    outcome = await alice.send("bob", b"poison", outcome=True, idempotent=True, timeout=20)
    assert isinstance(outcome, Unknown)
    assert "not sent again" in str(outcome.reason)
    await alice.online(10)
    assert await alice.send("bob", b"after")
    assert scripted.payloads() == [b"poison", b"poison", b"after"]


async def test_sends_beside_a_poison_one_are_confirmed(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    # Like a broker that confirms later than it checks: the link ends before any acknowledgement.
    held: list[bytes] = []

    def refuse_late(packet: mqtt5.PublishPacket) -> bytes | None:
        if packet.payload == b"poison":
            held.clear()
            return None
        held.append(acknowledged(packet))
        asyncio.get_running_loop().call_later(0.02, release)
        return b""

    def release() -> None:
        for data in held:
            scripted.send(data)
        held.clear()

    scripted.on_publish = refuse_late
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    contents = [b"1", b"2", b"poison", b"3", b"4"]
    outcomes = await asyncio.gather(
        *(alice.send("bob", content, outcome=True, timeout=20) for content in contents)
    )
    assert [type(one) for one in outcomes] == [Acked, Acked, Unknown, Acked, Acked]
    await alice.online(10)
    assert await alice.send("bob", b"after", timeout=20)
    assert scripted.payloads().count(b"poison") <= 4


@pytest.mark.parametrize("cuts", [1, 2, 3])
async def test_sends_in_flight_together_survive_cut_links(
    sessions: Sessions, scripted: ScriptedBroker, cuts: int
) -> None:
    scripted.on_publish = lambda packet: (
        None if len(scripted.links) <= cuts else acknowledged(packet)
    )
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    outcomes = await asyncio.gather(
        *(alice.send("bob", b"%d" % number, outcome=True, timeout=20) for number in range(5))
    )
    assert [type(one) for one in outcomes] == [Acked] * 5
    assert len(scripted.links) == cuts + 1


def resumed(protocol: Mqtt, memory: MqttMemory, *ids: str) -> tuple[MqttDialogue, list[str | None]]:
    """Return the next link, and the ids that it writes; None for each send that it gives up."""
    dialogue, _ = link(protocol, memory, session_present=True)
    sends = list(dialogue.resend(set(ids)))
    return dialogue, [None if data is None else id for id, data in sends if data != b""]


def test_only_a_send_that_was_alone_in_flight_twice_is_given_up() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    for id in ("a", "b", "c"):
        first.write(outgoing(id, b"x"))
    assert resumed(protocol, memory, "a", "b", "c")[1] == ["a", "b", "c"]
    probing, written = resumed(protocol, memory, "a", "b", "c")
    assert written == ["a"]
    confirmed, later = feed(probing, puback(1))
    assert confirmed == Confirmed("a")
    assert isinstance(later, Greeting)  # b, whose link ends now
    assert resumed(protocol, memory, "b", "c")[1] == ["b"]
    # Two links have ended with b alone in flight; c starts with no such link.
    assert resumed(protocol, memory, "b", "c")[1] == [None, "c"]
    assert resumed(protocol, memory, "c")[1] == ["c"]


@pytest.mark.parametrize("do", [MqttDialogue.ping, MqttDialogue.goodbye])
def test_link_that_continues_or_is_closed_by_us_is_not_blamed_on_a_send(
    do: Callable[[MqttDialogue], bytes],
) -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    dialogue, _ = link(protocol, memory)
    dialogue.write(outgoing("a", b"x"))
    for _ in range(5):
        do(dialogue)
        dialogue, written = resumed(protocol, memory, "a")
        assert written == ["a"]


async def test_burst_over_websocket_stays_below_the_frame_limit_of_the_broker(
    sessions: Sessions,
) -> None:
    async def broker(connection: ServerConnection) -> None:
        async for data in connection:
            packet, _ = mqtt5.read(memoryview(data))  # type: ignore[arg-type]
            if isinstance(packet, mqtt5.PublishPacket):
                await connection.send(acknowledged(packet))
            else:
                await connection.send(connack())

    protocols = [Subprotocol("mqtt")]
    async with serve(broker, "127.0.0.1", 0, subprotocols=protocols, max_size=2000) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        alice = await sessions.connect("alice", Mqtt(f"ws://127.0.0.1:{port}", subscribe=()))
        outcomes = await asyncio.gather(
            *(alice.send("bob", bytes(1000), outcome=True) for _ in range(20))
        )
        assert [type(one) for one in outcomes] == [Acked] * 20
        assert alice.generation == 1


async def test_disconnect_caused_by_a_send_does_not_stop_the_session(
    sessions: Sessions, scripted: ScriptedBroker
) -> None:
    gone = mqtt5.DisconnectPacket(reason_code=mqtt5.DisconnectReasonCode.NOT_AUTHORIZED).write()
    scripted.on_publish = lambda packet: (
        gone if packet.payload == b"poison" else acknowledged(packet)
    )
    alice = await sessions.connect("alice", Mqtt(scripted.url))
    assert isinstance(await alice.send("bob", b"poison", outcome=True, timeout=20), Unknown)
    await alice.online(10)
    assert await alice.send("bob", b"after")


def test_of_two_sends_with_one_id_only_the_later_is_written_again() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    first.write(outgoing("a", b"settled"))
    first.write(outgoing("a", b"under way"))
    first.write(outgoing("b", b"settled"))
    second, _ = link(protocol, memory, session_present=True)
    [(id, data)] = second.resend({"a"})
    assert id == "a"
    assert data is not None
    assert data.endswith(b"under way")
