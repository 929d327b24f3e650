"""Arbitrary bytes from a server give events or one error, and use bounded memory."""

from __future__ import annotations

import mqtt5
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sessions.mqtt.driver import outgoing
from tests.sessions.mqtt.peers import CONNACK, SUBACK, connack, puback, publish, room

from moored.sessions._errors import ProtocolError
from moored.sessions._protocol import Closing, Confirmed, DialogueEvent, Happening, Ready, Refused
from moored.sessions.mqtt import Mqtt, MqttDialogue
from moored.sessions.mqtt._codec import number
from moored.sessions.mqtt._frames import PacketFrames
from moored.testing import scaled

pytestmark = pytest.mark.pure

FUZZ = settings(max_examples=scaled(3_000, least=80), deadline=None)
SIZE = 2_000
#: The header, topic and packet id of a PUBLISH, which are kept of one that is too large.
TOPIC = 5 + 2 + 65_535 + 2
#: The DISCONNECT packets that an error may send before the link is closed.
FAREWELLS = {bytes((0xE0, 1, code)) for code in (0x81, 0x82, 0x93, 0x94, 0x95)}

PACKETS = [
    CONNACK,
    connack(session_present=True, receive_max=2, server_keep_alive=9, reason_str="ä"),
    SUBACK,
    bytes.fromhex("90 04 0003 00 01"),
    publish(1),
    publish(2, payload=bytes(500), content_type="text", user_properties=[("message-id", "7")]),
    publish(3, qos=2),
    publish(0, qos=0, retain=True, correlation_data=b"\0"),
    puback(1),
    puback(2),
    puback(65535),
    mqtt5.PubAckPacket(3, reason_code=mqtt5.PubAckReasonCode.QUOTA_EXCEEDED).write(),
    mqtt5.PubRelPacket(3).write(),
    mqtt5.PubRecPacket(1).write(),
    mqtt5.PubCompPacket(1).write(),
    mqtt5.UnsubAckPacket(1, [mqtt5.UnsubAckReasonCode.SUCCESS]).write(),
    mqtt5.PingRespPacket().write(),
    mqtt5.DisconnectPacket(reason_str="bye").write(),
    mqtt5.AuthPacket().write(),
    mqtt5.PingReqPacket().write(),
    mqtt5.ConnectPacket("x").write(),
    bytes.fromhex("30 ff ff ff 7f"),
    bytes.fromhex("00 00"),
]


def begin() -> MqttDialogue:
    protocol = Mqtt("mqtt://broker", max_packet_size=SIZE, receive_maximum=4)
    return protocol.begin("alice", None, protocol.remember())


class FedDialogue:
    """A dialogue that acknowledges some messages, and the events of what it was fed."""

    def __init__(self) -> None:
        self.dialogue = begin()
        self.events: list[DialogueEvent] = []
        self.farewells: list[bytes] = []
        self.ended = False
        self.sent = 0

    def feed(self, data: bytes) -> None:
        """Feed bytes, and check the dialogue's state."""
        had_ended = self.ended
        try:
            for event in self.dialogue.feed(data):
                assert not self.ended, "an event came after the end"
                self._handle(event)
        except ProtocolError as error:
            self.farewells.append(error.farewell)
            self.ended = True
        assert not had_ended or self.ended
        rest = self.dialogue._frames._rest or b"\0"
        assert len(rest) <= (TOPIC if rest[0] & 0xF0 == 0x30 else SIZE)
        assert len(self.dialogue._arrived) <= 4
        assert set(self.farewells) <= FAREWELLS
        assert len(self.farewells) <= 1, "the link ended twice"

    def _handle(self, event: DialogueEvent) -> None:
        self.events.append(event)
        if isinstance(event, Ready):
            while self.sent < 3 and room(self.dialogue) > 0:
                self.sent += 1
                self.dialogue.write(outgoing(f"{self.sent}"))
        elif isinstance(event, Happening) and getattr(event.frame, "payload", b"hi") != b"hi":
            self.dialogue.acknowledge(event.token)
        elif isinstance(event, Closing):
            self.ended = True


@FUZZ
@given(st.lists(st.sampled_from(PACKETS), max_size=12), st.data())
def test_packets_in_any_order_and_split_anywhere_keep_the_invariants(
    packets: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(packets)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    fed = FedDialogue()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        fed.feed(stream[start:end])
    settled = [event.id for event in fed.events if isinstance(event, Confirmed | Refused)]
    assert len(settled) == len(set(settled)), "a send was settled twice"


@FUZZ
@given(
    st.lists(st.sampled_from(PACKETS), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 3_000),
)
@example([bytes.fromhex("30 06 0001 61 02 26 00")], [], 3_000)
@example([bytes.fromhex("30 ff ff ff 7f ff ff"), bytes(60_000)], [], 60_000)
def test_damaged_packets_keep_the_invariants(
    packets: list[bytes], damage: list[tuple[int, int]], end: int
) -> None:
    stream = bytearray(b"".join(packets))
    for position, value in damage:
        stream[position % len(stream)] = value
    for handshake in (b"", CONNACK, CONNACK + SUBACK):
        fed = FedDialogue()
        fed.feed(handshake)
        fed.feed(bytes(stream[:end]))


@FUZZ
@given(st.binary(max_size=200))
def test_arbitrary_bytes_keep_the_invariants(noise: bytes) -> None:
    for handshake in (b"", CONNACK, CONNACK + SUBACK):
        fed = FedDialogue()
        fed.feed(handshake)
        fed.feed(noise)


def test_events_do_not_depend_on_how_a_stream_is_split() -> None:
    stream = b"".join((CONNACK, SUBACK, publish(1), puback(3), PACKETS[5], puback(2), b"\xd0\x00"))
    whole = FedDialogue()
    whole.feed(stream)
    kinds = [type(event).__name__ for event in whole.events]
    expected = "Remember Greeting Ready Happening Confirmed Happening Confirmed Ignored"
    assert kinds == expected.split()
    for size in range(1, len(stream)):
        cut = FedDialogue()
        for at in range(0, len(stream), size):
            cut.feed(stream[at : at + size])
        assert cut.events == whole.events


def test_large_packet_in_small_pieces_is_parsed_once() -> None:
    frames = PacketFrames(1 << 20)
    packet = b"\x30\x80\x80\x10" + bytes(1 << 18)
    pieces = [packet[at : at + 64] for at in range(0, len(packet), 64)]
    found = [frame for piece in pieces for frame in frames.cut(piece)]
    assert [(first, end - start) for first, _, start, end in found] == [(0x30, 1 << 18)]
    assert not frames._rest


def test_packet_of_the_maximum_size_is_accepted_and_a_larger_one_refused() -> None:
    for size in (SIZE - 3, SIZE - 2):
        frames = PacketFrames(SIZE)
        packet = b"\x90" + number(size) + bytes(size)
        assert len(packet) == size + 3
        if len(packet) <= SIZE:
            assert len(list(frames.cut(packet))) == 1
            continue
        with pytest.raises(ProtocolError, match=f"a packet of {SIZE + 1} bytes") as caught:
            list(frames.cut(packet[:3]))
        assert caught.value.farewell == b"\xe0\x01\x95"
        assert not frames._rest
