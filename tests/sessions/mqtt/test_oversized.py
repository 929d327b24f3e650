"""Messages above the maximum packet size, which some brokers send anyway."""

from __future__ import annotations

import mqtt5
import pytest
from tests.sessions.mqtt.driver import outgoing
from tests.sessions.mqtt.peers import connack, feed, link, puback, publish
from tests.sessions.mqtt.scripted import ScriptedBroker
from tests.sessions.support import collect, until
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from moored.sessions import Acked, Incoming, Msg, SendNotSent, Sessions, SetAside, StepFailed
from moored.sessions._errors import ProtocolError
from moored.sessions._protocol import Confirmed, DialogueEvent, Greeting, Happening, Ready
from moored.sessions.mqtt import MessageTooLarge, Mqtt, MqttMemory

LIMIT = 1000
LARGE = bytes(3 * LIMIT)
#: PUBACK and PUBREC that say "implementation specific error", which ends the delivery.
REFUSED, REFUSED_TWICE = "40 03 {:04x} 83", "50 03 {:04x} 83"


def contents(received: list[Incoming]) -> list[bytes]:
    return [event.data.content for event in received if isinstance(event.data, Msg)]


def asides(received: list[Incoming]) -> list[SetAside]:
    return [event.data for event in received if isinstance(event.data, SetAside)]


@pytest.mark.every_loop
async def test_oversized_message_is_set_aside_and_the_session_continues(
    sessions: Sessions,
) -> None:
    async with ScriptedBroker() as broker:
        alice = await sessions.connect("alice", Mqtt(broker.url, max_packet_size=LIMIT))
        received = collect(alice)
        broker.send(publish(1) + publish(2, payload=LARGE) + publish(3, payload=b"after"))
        await until(lambda: contents(received) == [b"hi", b"after"])
        assert isinstance(await alice.send("bob", b"x"), Acked)
        [aside] = asides(received)
        assert isinstance(aside.error, MessageTooLarge)
        assert (aside.error.topic, aside.error.limit) == ("alice", LIMIT)
        assert aside.error.size > len(LARGE)
        assert alice.status()["messages_set_aside"] == 1
        await until(lambda: len(broker.sent(mqtt5.PubAckPacket)) == 3)
        assert [one.packet_id for one in broker.sent(mqtt5.PubAckPacket)] == [1, 2, 3]
        assert alice.generation == 1


async def test_oversized_send_is_not_called_safe_to_repeat(sessions: Sessions) -> None:
    async with ScriptedBroker() as broker:
        broker.connack = {"max_packet_size": LIMIT}
        alice = await sessions.connect("alice", Mqtt(broker.url))
        why = f"the server accepts {LIMIT}; do not send it again unchanged"
        with pytest.raises(SendNotSent, match=why) as caught:
            await alice.send("bob", LARGE)
        assert isinstance(caught.value.__cause__, StepFailed)
        assert isinstance(await alice.send("bob", b"x"), Acked)
        assert broker.payloads() == [b"x"]


async def test_oversized_message_over_websocket_is_set_aside(sessions: Sessions) -> None:
    async def broker(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(connack())
        await connection.send(publish(1, payload=bytes(3 << 20)) + publish(2))
        async for _ in connection:
            pass

    async with serve(broker, "127.0.0.1", 0, subprotocols=[Subprotocol("mqtt")]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        alice = await sessions.connect("alice", Mqtt(f"ws://127.0.0.1:{port}", subscribe=()))
        received = collect(alice)
        await until(lambda: contents(received) == [b"hi"])
        assert len(asides(received)) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 5000])
@pytest.mark.parametrize(("qos", "answer"), [(1, REFUSED), (2, REFUSED_TWICE), (0, "")])
def test_oversized_packet_is_handled_alike_however_it_is_split(
    size: int, qos: int, answer: str
) -> None:
    dialogue, _ = link(Mqtt("mqtt://broker", subscribe=(), max_packet_size=LIMIT))
    dialogue.write(outgoing("1"))
    stream = publish(5, qos=qos, payload=LARGE) + puback(1) + publish(6, payload=LARGE) + publish(7)
    events: list[DialogueEvent] = []
    for at in range(0, len(stream), size):
        events += feed(dialogue, stream[at : at + size])
    first, *rest = events
    if answer:
        assert first == Greeting(bytes.fromhex(answer.format(5)))
        first, *rest = rest
    assert isinstance(first, Happening)
    assert isinstance(first.frame, MessageTooLarge)
    assert first.token is None
    kinds = [Confirmed, Greeting, Happening, Happening]
    assert [type(event) for event in rest] == kinds
    assert rest[1] == Greeting(bytes.fromhex(REFUSED.format(6)))


def test_acknowledgements_stay_in_order_around_an_oversized_message() -> None:
    dialogue, _ = link(Mqtt("mqtt://broker", subscribe=(), max_packet_size=LIMIT))
    stream = publish(1) + publish(2, payload=LARGE) + publish(3)
    kinds = [type(event) for event in feed(dialogue, stream)]
    assert kinds == [Happening, Happening, Happening]
    assert dialogue.acknowledge(3) == b""
    assert dialogue.acknowledge(1) == puback(1) + bytes.fromhex(REFUSED.format(2)) + puback(3)


def test_oversized_packet_other_than_publish_ends_the_link() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=(), max_packet_size=LIMIT)
    dialogue = protocol.begin("alice", None, MqttMemory())
    with pytest.raises(ProtocolError, match="3000 bytes") as caught:
        feed(dialogue, b"\x20\xb5\x17" + bytes(10))
    assert caught.value.farewell == b"\xe0\x01\x95"
    assert not any(isinstance(event, Ready) for event in feed(dialogue, connack()))
