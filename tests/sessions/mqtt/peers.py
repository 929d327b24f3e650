"""Packets of the broker for tests of a dialogue."""

from __future__ import annotations

from typing import Any

import mqtt5

from moored.sessions._protocol import DialogueEvent, Ready
from moored.sessions.mqtt import Mqtt, MqttDialogue, MqttMemory

__all__ = ["CONNACK", "SUBACK", "connack", "feed", "link", "puback", "publish", "room"]

CONNACK = bytes.fromhex("20 03 00 00 00")
#: The answer to a first subscription, granted.
SUBACK = bytes.fromhex("90 04 0001 00 01")


def feed(dialogue: MqttDialogue, data: bytes) -> list[DialogueEvent]:
    """Feed bytes to a dialogue, and return its events."""
    return list(dialogue.feed(data))


def room(dialogue: MqttDialogue) -> int:
    """Return how many more sends the window allows."""
    return dialogue._window - len(dialogue._memory.inflight)


def connack(**options: Any) -> bytes:
    """Make a CONNACK."""
    return mqtt5.ConnAckPacket(**options).write()


def puback(packet_id: int) -> bytes:
    """Make a PUBACK without properties."""
    return b"\x40\x02" + packet_id.to_bytes(2, "big")


def publish(packet_id: int, qos: int = 1, payload: bytes = b"hi", **options: Any) -> bytes:
    """Make a PUBLISH to the client."""
    number = packet_id if qos else None
    packet = mqtt5.PublishPacket("alice", payload, qos=mqtt5.QoS(qos), packet_id=number, **options)
    return packet.write()


def link(
    protocol: Mqtt | None = None, memory: MqttMemory | None = None, **options: Any
) -> tuple[MqttDialogue, list[DialogueEvent]]:
    """Return an open dialogue, and the events of its handshake."""
    protocol = protocol or Mqtt("mqtt://broker", subscribe=())
    memory = memory if memory is not None else protocol.remember()
    dialogue = protocol.begin("alice", None, memory)
    assert dialogue.hello()[0] == 0x10
    events = feed(dialogue, connack(**options))
    if not any(isinstance(event, Ready) for event in events):
        events += feed(dialogue, SUBACK)
    return dialogue, events
