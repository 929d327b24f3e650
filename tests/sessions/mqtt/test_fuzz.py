"""Whatever a server sends: an event, or one error that closes the link; and never too much kept."""

from __future__ import annotations

import mqtt5
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sessions.mqtt.driver import outgoing
from tests.sessions.mqtt.peers import CONNACK, SUBACK, connack, puback, publish

from moored.sessions._errors import ProtocolError
from moored.sessions._protocol import Closing, Confirmed, DialogueEvent, Happening, Ready, Refused
from moored.sessions.mqtt import Mqtt, MqttDialogue
from moored.sessions.mqtt._codec import number
from moored.sessions.mqtt._frames import PacketFrames
from moored.testing import scaled

pytestmark = pytest.mark.pure

OFTEN = settings(max_examples=scaled(3_000, least=80), deadline=None)
SIZE = 2_000
#: What an error may say before the link is closed.
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


class Played:
    """A dialogue that was fed, acknowledging as it goes, and what came of it."""

    def __init__(self) -> None:
        self.dialogue = begin()
        self.events: list[DialogueEvent] = []
        self.farewells: list[bytes] = []
        self.over = False
        self.sent = 0

    def feed(self, data: bytes) -> None:
        """Feed it, and look at what it keeps."""
        was_over = self.over
        try:
            for event in self.dialogue.feed(data):
                assert not self.over, "nothing comes after the end"
                self._handle(event)
        except ProtocolError as error:
            self.farewells.append(error.farewell)
            self.over = True
        assert not was_over or self.over
        assert self.dialogue._frames.kept <= SIZE
        assert len(self.dialogue._arrived) <= 4
        assert set(self.farewells) <= FAREWELLS
        assert len(self.farewells) <= 1, "it is over only once"

    def _handle(self, event: DialogueEvent) -> None:
        self.events.append(event)
        if isinstance(event, Ready):
            while self.sent < 3 and self.dialogue.room > 0:
                self.sent += 1
                self.dialogue.write(outgoing(f"{self.sent}"))
        elif isinstance(event, Happening) and getattr(event.frame, "payload", b"hi") != b"hi":
            self.dialogue.acknowledge(event.token)
        elif isinstance(event, Closing):
            self.over = True


@OFTEN
@given(st.lists(st.sampled_from(PACKETS), max_size=12), st.data())
def test_packets_in_any_order_cut_anywhere(packets: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(packets)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    played = Played()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        played.feed(stream[start:end])
    settled = [event.id for event in played.events if isinstance(event, Confirmed | Refused)]
    assert len(settled) == len(set(settled)), "a send is settled once"


@OFTEN
@given(
    st.lists(st.sampled_from(PACKETS), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 3_000),
)
@example([bytes.fromhex("30 06 0001 61 02 26 00")], [], 3_000)
def test_damaged_packets(packets: list[bytes], damage: list[tuple[int, int]], end: int) -> None:
    stream = bytearray(b"".join(packets))
    for place, value in damage:
        stream[place % len(stream)] = value
    for handshake in (b"", CONNACK, CONNACK + SUBACK):
        played = Played()
        played.feed(handshake)
        played.feed(bytes(stream[:end]))


@OFTEN
@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    for handshake in (b"", CONNACK, CONNACK + SUBACK):
        played = Played()
        played.feed(handshake)
        played.feed(noise)


def test_it_does_not_matter_where_a_stream_is_cut() -> None:
    stream = b"".join((CONNACK, SUBACK, publish(1), puback(3), PACKETS[5], puback(2), b"\xd0\x00"))
    whole = Played()
    whole.feed(stream)
    kinds = [type(event).__name__ for event in whole.events]
    expected = "Remember Greeting Ready Happening Confirmed Happening Confirmed Ignored"
    assert kinds == expected.split()
    for size in range(1, len(stream)):
        cut = Played()
        for at in range(0, len(stream), size):
            cut.feed(stream[at : at + size])
        assert cut.events == whole.events


def test_a_large_packet_in_small_pieces_is_looked_at_once() -> None:
    frames = PacketFrames(1 << 20)
    packet = b"\x30\x80\x80\x10" + bytes(1 << 18)
    pieces = [packet[at : at + 64] for at in range(0, len(packet), 64)]
    found = [frame for piece in pieces for frame in frames.cut(piece)]
    assert [(first, end - start) for first, _, start, end in found] == [(0x30, 1 << 18)]
    assert frames.kept == 0


def test_a_packet_may_be_as_large_as_we_said_and_no_larger() -> None:
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
        assert frames.kept == 0
