"""The MQTT dialogue: its events and bytes for given packets."""

from __future__ import annotations

import mqtt5
import pytest
from tests.sessions.mqtt.driver import outgoing
from tests.sessions.mqtt.peers import CONNACK, SUBACK, connack, feed, link, puback, publish, room

from moored.sessions._content import Text
from moored.sessions._errors import ProtocolError, StepFailed
from moored.sessions._protocol import (
    CloseClass,
    Closing,
    Confirmed,
    Greeting,
    Happening,
    Ignored,
    Ready,
    Refused,
    Remember,
    Unhandled,
)
from moored.sessions.mqtt import Message, Mqtt, MqttMemory, Publication, SubscriptionRefused
from moored.sessions.mqtt._dialogue import OVERRUN

pytestmark = pytest.mark.pure

# -- the handshake -----------------------------------------------------------------------------


def test_link_is_ready_when_its_subscriptions_are_confirmed() -> None:
    dialogue = Mqtt("mqtt://broker").begin("alice", None, Mqtt("mqtt://broker").remember())
    remember, subscribe = feed(dialogue, CONNACK)
    assert remember == Remember(b"alice")
    assert subscribe == Greeting(bytes.fromhex("82 0b 0001 00 0005 616c696365 11"))
    with pytest.raises(StepFailed, match="the link is subscribing"):
        dialogue.write(outgoing("1"))
    assert feed(dialogue, SUBACK) == [Ready(False, 1024)]


def test_link_without_subscriptions_is_ready_after_the_connack() -> None:
    _, events = link(receive_max=5, server_keep_alive=12)
    assert events == [Ready(False, 5, 12.0)]


def test_server_keepalive_can_only_be_shorter() -> None:
    for ours, theirs, used in ((30, 10, 10.0), (30, 60, None), (30, 0, None), (None, 60, 60.0)):
        protocol = Mqtt("mqtt://broker", subscribe=(), keepalive=ours)
        assert link(protocol, server_keep_alive=theirs)[1] == [Ready(False, 1024, used)]


def suback(memory: MqttMemory) -> bytes:
    """Make a SUBACK that grants the last SUBSCRIBE of one filter."""
    return bytes.fromhex("90 04") + memory.last.to_bytes(2, "big") + bytes.fromhex("00 01")


def test_resumed_session_subscribes_to_all_filters_again() -> None:
    protocol = Mqtt("mqtt://broker")
    memory = protocol.remember()
    link(protocol, memory)
    for present in (True, False):
        again = protocol.begin("alice", None, memory)
        [greeting] = feed(again, connack(session_present=present))
        assert isinstance(greeting, Greeting)
        assert feed(again, suback(memory)) == [Ready(present, 1024)]


def test_lost_session_is_reported_until_a_link_was_ready() -> None:
    protocol = Mqtt("mqtt://broker")
    memory = protocol.remember()
    link(protocol, memory)
    cut = protocol.begin("alice", None, memory)
    feed(cut, connack())
    # That link created a new session on the server; the state of the one before is lost.
    after = protocol.begin("alice", None, memory)
    assert isinstance(feed(after, connack(session_present=True))[0], Greeting)
    assert feed(after, suback(memory)) == [Ready(False, 1024)]
    again = protocol.begin("alice", None, memory)
    feed(again, connack(session_present=True))
    assert feed(again, suback(memory)) == [Ready(True, 1024)]


def test_refused_subscriptions_are_reported_and_requested_again() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=("{profile}", "news/{profile}"))
    memory = protocol.remember()
    dialogue = protocol.begin("alice", None, memory)
    feed(dialogue, CONNACK)
    report, event, ready = feed(dialogue, bytes.fromhex("90 05 0001 00 01 87"))
    assert report == Unhandled("no subscription to news/{profile}: not authorized (0x87)")
    assert event == Happening(SubscriptionRefused("news/alice", 0x87, "not authorized"))
    assert isinstance(ready, Ready)
    again = protocol.begin("alice", None, memory)
    [greeting] = feed(again, connack(session_present=True))
    assert isinstance(greeting, Greeting)
    assert b"news/alice" in greeting.data


def test_unsupported_kinds_of_subscription_are_not_requested() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=("{profile}/#", "$share/workers/jobs"))
    dialogue = protocol.begin("alice", None, protocol.remember())
    options = {"wildcard_subscription_available": False, "shared_subscription_available": False}
    events = feed(dialogue, connack(**options))
    assert [type(event) for event in events] == [*(Unhandled, Happening) * 2, Ready]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0x80, CloseClass.TRANSIENT),
        (0x84, CloseClass.OUTDATED),
        (0x85, CloseClass.AUTHENTICATION),
        (0x86, CloseClass.AUTHENTICATION),
        (0x87, CloseClass.AUTHENTICATION),
        (0x88, CloseClass.TRANSIENT),
        (0x89, CloseClass.TRANSIENT),
        (0x8A, CloseClass.BANNED),
        (0x8C, CloseClass.AUTHENTICATION),
        (0x97, CloseClass.TRANSIENT),
        (0x9C, CloseClass.TRANSIENT),
        (0x9D, CloseClass.TRANSIENT),
        (0x9F, CloseClass.TRANSIENT),
        (0xFE, CloseClass.TRANSIENT),
    ],
)
def test_connack_code_decides_the_close_class(code: int, kind: CloseClass) -> None:
    dialogue = Mqtt("mqtt://broker").begin("alice", None, Mqtt("mqtt://broker").remember())
    [closing] = feed(dialogue, bytes((0x20, 3, 0, code, 0)))
    assert isinstance(closing, Closing)
    assert (closing.kind, closing.code) == (kind, code)
    assert closing.reason


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0x00, CloseClass.TRANSIENT),
        (0x87, CloseClass.TRANSIENT),
        (0x9A, CloseClass.TRANSIENT),
        (0x8B, CloseClass.TRANSIENT),
        (0x8D, CloseClass.TRANSIENT),
        (0x8E, CloseClass.TAKEOVER),
        (0x98, CloseClass.TRANSIENT),
        (0xA0, CloseClass.RESTART),
    ],
)
def test_disconnect_code_decides_the_close_class(code: int, kind: CloseClass) -> None:
    dialogue, _ = link()
    [closing] = feed(dialogue, bytes((0xE0, 1, code)) + puback(1))
    assert isinstance(closing, Closing)
    assert (closing.kind, closing.code) == (kind, code)
    assert feed(dialogue, puback(1)) == [], "an event came after the end"


def test_close_reason_contains_reason_string_and_server_reference() -> None:
    code = mqtt5.ConnAckReasonCode.SERVER_MOVED
    data = connack(reason_code=code, reason_str="maintenance", server_reference="other:1883")
    protocol = Mqtt("mqtt://broker")
    [closing] = feed(protocol.begin("alice", None, protocol.remember()), data)
    assert isinstance(closing, Closing)
    assert closing.reason == "the server has moved: maintenance: other:1883"


def test_server_without_qos_1_is_refused() -> None:
    protocol = Mqtt("mqtt://broker")
    dialogue = protocol.begin("alice", None, protocol.remember())
    [closing] = feed(dialogue, connack(max_qos=mqtt5.QoS.AT_MOST_ONCE))
    assert isinstance(closing, Closing)
    assert (closing.kind, closing.farewell) == (CloseClass.OUTDATED, b"\xe0\x00")


# -- sends -------------------------------------------------------------------------------------


def test_pubacks_confirm_or_refuse_their_sends() -> None:
    dialogue, _ = link()
    for number in range(1, 4):
        assert dialogue.write(outgoing(f"id-{number}")).startswith(b"\x32")
    reason = mqtt5.PubAckReasonCode.NO_MATCHING_SUBSCRIBERS
    refused = mqtt5.PubAckReasonCode.QUOTA_EXCEEDED
    data = (
        puback(2)
        + mqtt5.PubAckPacket(1, reason_code=reason).write()
        + mqtt5.PubAckPacket(3, reason_code=refused, reason_str="too much").write()
        + puback(2)
    )
    assert feed(dialogue, data) == [
        Confirmed("id-2"),
        Confirmed("id-1", "no matching subscribers"),
        Refused("id-3", 0x97, "too much"),
        Unhandled("a PUBACK for a packet that is not in flight"),
    ]


def test_packet_ids_are_never_0_and_never_in_use() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    dialogue, _ = link(protocol, memory)
    memory.last = 0xFFFE
    dialogue.write(outgoing("last"))
    dialogue.write(outgoing("first"))
    assert list(memory.inflight) == [0xFFFF, 1]
    memory.last = 0xFFFE
    dialogue.write(outgoing("next"))
    assert list(memory.inflight) == [0xFFFF, 1, 2]


def test_sends_that_the_server_cannot_accept_are_not_written() -> None:
    protocol = Mqtt("mqtt://broker", topic="to/{recipient}", subscribe=())
    memory = protocol.remember()
    dialogue, _ = link(protocol, memory, max_packet_size=200, retain_available=False, receive_max=1)
    bad = [
        (outgoing("1", bytes(200)), "230 bytes, and the server accepts 200"),
        (outgoing("1", Message(b"", retain=True)), "does not support retained"),
        (outgoing("1", 5), "int is not bytes"),
        (outgoing("1", recipient="a/#"), "no \\+, # or NUL"),
        (outgoing("1", recipient="a\0"), "no \\+, # or NUL"),
        (outgoing("1", recipient="\ud800"), "surrogates not allowed"),
        (outgoing("1", recipient="x" * 65536), "1 to 65535 bytes"),
        (outgoing("a\0b"), "its id has a NUL"),
        (outgoing("1", "\ud800"), "surrogates not allowed"),
    ]
    for send, why in bad:
        with pytest.raises(StepFailed, match=why):
            dialogue.write(send)
    assert not memory.inflight
    assert room(dialogue) == 1
    dialogue.write(outgoing("fits"))
    with pytest.raises(StepFailed, match="no more than 1 unconfirmed"):
        dialogue.write(outgoing("one too many"))


def test_strings_are_marked_as_utf8() -> None:
    dialogue, _ = link()
    for content in ("grüße", Text("grüße"), Message("grüße")):
        data = dialogue.write(outgoing("1", content))
        theirs, _ = mqtt5.read(memoryview(data))
        assert isinstance(theirs, mqtt5.PublishPacket)
        assert (theirs.payload, theirs.payload_format_indicator) == ("grüße".encode(), 1)
    kept, _ = mqtt5.read(memoryview(dialogue.write(outgoing("1", Message(b"x", retain=True)))))
    assert isinstance(kept, mqtt5.PublishPacket)
    assert kept.retain


def test_resumed_link_writes_unconfirmed_sends_again_in_order() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    written = {id: first.write(outgoing(id)) for id in ("a", "b", "c", "d")}
    feed(first, puback(2))
    second, events = link(protocol, memory, session_present=True)
    assert events == [Ready(True, 1024)]
    again = dict(second.resend("acd"))
    assert list(again) == ["a", "c", "d"]
    for id, data in again.items():
        assert data is not None
        assert data[0] == 0x3A, "the DUP flag is missing"
        assert data[1:] == written[id][1:]
    assert feed(second, puback(1)) == [Confirmed("a")]


def test_smaller_window_holds_back_repeated_sends() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    for id in "abcd":
        first.write(outgoing(id))
    second, _ = link(protocol, memory, session_present=True, receive_max=2)
    again = list(second.resend("abcd"))
    assert [(id, bool(data)) for id, data in again] == [
        ("a", True),
        ("b", True),
        ("c", False),
        ("d", False),
    ]
    assert room(second) < 0
    confirmed, greeting = feed(second, puback(2))
    assert confirmed == Confirmed("b")
    assert isinstance(greeting, Greeting)
    assert greeting.data[0] == 0x3A
    assert greeting.data[-5:] == b"hello"
    assert len(feed(second, puback(1))) == 2
    assert feed(second, puback(3)) == [Confirmed("c")]
    assert room(second) == 1


def test_sends_that_the_server_has_forgotten_are_not_written_again() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    first.write(outgoing("a"))
    second, events = link(protocol, memory)
    assert events == [Ready(False, 1024)]
    assert list(second.resend("a")) == []
    assert not memory.inflight


def test_acknowledgement_before_the_handshake_confirms_nothing() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    first.write(outgoing("a"))
    second = protocol.begin("alice", None, memory)
    with pytest.raises(ProtocolError, match="before the CONNACK"):
        feed(second, puback(1))
    assert list(memory.inflight) == [1]


# -- messages ----------------------------------------------------------------------------------


def test_messages_are_acknowledged_in_the_order_of_arrival() -> None:
    dialogue, _ = link()
    events = feed(dialogue, publish(5) + publish(3) + publish(9, payload=b"9") + publish(0, qos=0))
    assert [event.token for event in events if isinstance(event, Happening)] == [5, 3, 9, None]
    assert dialogue.acknowledge(9) == b""
    assert dialogue.acknowledge(9) == b"", "acknowledged twice"
    assert dialogue.acknowledge(5) == puback(5)
    assert dialogue.acknowledge(3) == puback(3) + puback(9)
    assert dialogue.acknowledge(3) == b""
    assert dialogue.acknowledge(77) == b"", "acknowledged a message of another link"


def test_message_of_qos_2_is_delivered_once() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    memory = protocol.remember()
    first, _ = link(protocol, memory)
    [event] = feed(first, publish(5, qos=2))
    assert isinstance(event, Happening)
    assert first.acknowledge(5) == bytes.fromhex("50 02 0005")
    second, _ = link(protocol, memory, session_present=True)
    assert feed(second, publish(5, qos=2, duplicate=True)) == [Greeting(bytes.fromhex("50020005"))]
    assert feed(second, bytes.fromhex("62 02 0005")) == [Greeting(bytes.fromhex("70020005"))]
    assert feed(second, bytes.fromhex("62 02 0005")) == [Greeting(bytes.fromhex("7003000592"))]
    assert isinstance(feed(second, publish(5, qos=2))[0], Happening), (
        "a new message with a reused id was dropped"
    )


def test_server_that_never_releases_qos_2_messages_is_disconnected() -> None:
    dialogue, _ = link(Mqtt("mqtt://broker", subscribe=(), receive_maximum=2))
    most = 2 + OVERRUN
    for number in range(1, most + 1):
        assert feed(dialogue, publish(number, qos=2)), number
        assert dialogue.acknowledge(number)
    with pytest.raises(ProtocolError, match="more than 2 unacknowledged") as caught:
        feed(dialogue, publish(most + 1))
    assert caught.value.farewell == b"\xe0\x01\x93"


@pytest.mark.parametrize("present", [False, True])
def test_messages_above_the_limit_are_left_to_the_next_link(present: bool) -> None:
    protocol = Mqtt("mqtt://broker", subscribe=(), receive_maximum=2)
    memory = protocol.remember()
    link(protocol, memory)
    dialogue, _ = link(protocol, memory, session_present=present)
    most = 2 + OVERRUN
    for number in range(1, most + 1):
        assert feed(dialogue, publish(number, duplicate=True)), number
    assert feed(dialogue, publish(most + 1, duplicate=True)) == []
    for number in range(1, most):
        assert dialogue.acknowledge(number) == puback(number)
    # There is room again, but it must not overtake the message that was left.
    assert feed(dialogue, publish(most + 2)) == []
    with pytest.raises(ProtocolError, match="a new link delivers the rest") as caught:
        dialogue.acknowledge(most)
    assert caught.value.farewell == puback(most) + b"\xe0\x00"
    assert feed(dialogue, publish(most + 3)) == []


def test_ping_and_goodbye_have_the_expected_bytes() -> None:
    dialogue, _ = link()
    assert dialogue.ping() == b"\xc0\x00"
    assert feed(dialogue, b"\xd0\x00") == [Ignored()]
    assert dialogue.goodbye() == b"\xe0\x00"


def test_events_before_malformed_bytes_are_delivered() -> None:
    dialogue, _ = link()
    dialogue.write(outgoing("1"))
    events = iter(dialogue.feed(puback(1) + b"\x00\x00"))
    assert next(events) == Confirmed("1")
    with pytest.raises(ProtocolError) as caught:
        next(events)
    assert caught.value.farewell == b"\xe0\x01\x82"
    assert feed(dialogue, CONNACK) == []


def test_dialogue_can_be_used_before_all_events_are_read() -> None:
    protocol = Mqtt("mqtt://broker", subscribe=())
    dialogue = protocol.begin("alice", None, protocol.remember())
    events = iter(dialogue.feed(CONNACK + puback(1) + b"\xe0\x01\x8e"))
    assert isinstance(next(events), Ready)
    dialogue.write(outgoing("1"))
    assert next(events) == Confirmed("1")
    assert isinstance(next(events), Closing)


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("20 03 00 00 00", 0x82),  # a second CONNACK
        ("f0 00", 0x82),  # AUTH without a request
        ("82 06 0001 00 0001 61", 0x82),  # SUBSCRIBE: a client's packet
        ("c0 00", 0x82),  # PINGREQ
        ("41 02 0001", 0x81),  # PUBACK with flags
        ("60 02 0001", 0x81),  # PUBREL without its flags
        ("d0 01 00", 0x81),  # PINGRESP with a body
        ("40 01 00", 0x81),  # half a packet id
        ("40 02 0000", 0x82),  # packet id 0
        ("40 05 0001 00 00 00", 0x81),  # too long
        ("90 04 0001 00 01", 0x82),  # SUBACK for nothing
        ("b0 04 0001 00 00", 0x82),  # UNSUBACK for nothing
        ("36 05 0001 61 0001", 0x81),  # QoS 3
        ("38 04 0001 61 00", 0x81),  # a duplicate of QoS 0
        ("32 06 0001 61 0000 00", 0x82),  # packet id 0
        ("30 04 0001 23 00", 0x81),  # a topic with #
        ("30 03 0000 00", 0x82),  # no topic
        ("30 07 0001 61 03 23 0001", 0x94),  # a topic alias
        ("30 04 0001 ff 00", 0x81),  # not UTF-8
        ("30 02 0009", 0x81),  # cut off
        ("e0 02 00 7f", 0x81),  # properties beyond the packet
        ("40 ff ff ff 7f", 0x95),  # 256 MB, and no message
        ("30 ff ff ff ff 7f", 0x81),  # a length of five bytes
        ("30 80 00", 0x81),  # a length in more bytes than needed
    ],
)
def test_malformed_packets_are_answered_with_the_right_code(written: str, code: int) -> None:
    dialogue, _ = link()
    with pytest.raises(ProtocolError) as caught:
        feed(dialogue, bytes.fromhex(written))
    assert caught.value.farewell == bytes((0xE0, 1, code))
    assert "closed" in repr(dialogue)


@pytest.mark.parametrize(
    "written",
    [
        "20 03 02 00 00",  # flags
        "20 03 01 87 00",  # refused, and yet a session
        "20 03 00 01 00",  # no such code
        "20 02 00 00",  # accepted by an older version
        "20 06 00 00 03 15 00 00",  # an authentication method
        "20 01 00",
        "30 04 0001 61 00",  # a message before the CONNACK
    ],
)
def test_malformed_handshake_is_a_protocol_error(written: str) -> None:
    protocol = Mqtt("mqtt://broker")
    with pytest.raises(ProtocolError):
        feed(protocol.begin("alice", None, protocol.remember()), bytes.fromhex(written))


def test_session_present_after_a_clean_start_is_a_protocol_error() -> None:
    protocol = Mqtt("mqtt://broker", clean_start=True)
    with pytest.raises(ProtocolError, match="after a clean start"):
        link(protocol, session_present=True)


def test_suback_must_match_its_subscribe() -> None:
    protocol = Mqtt("mqtt://broker")
    for bad in ("90 04 0002 00 01", "90 05 0001 00 01 01"):
        dialogue = protocol.begin("alice", None, protocol.remember())
        feed(dialogue, CONNACK)
        with pytest.raises(ProtocolError):
            feed(dialogue, bytes.fromhex(bad))


def test_acknowledgements_of_qos_2_end_the_link_because_no_send_has_it() -> None:
    for stray in ("70 02 0001", "50 03 0001 80", "50 02 0001"):
        dialogue, _ = link()
        with pytest.raises(ProtocolError, match="a server must not send"):
            feed(dialogue, bytes.fromhex(stray))


def test_publication_is_routed_and_interpreted() -> None:
    protocol = Mqtt("mqtt://broker")
    frame = Publication("alice", b"hi", "1", True, True, {"content_type": "x"})
    assert protocol.route(frame) == "message"
    assert protocol.route(object()) == "unhandled"
    msg = protocol.interpret("message", frame)
    assert msg is not None
    assert (msg.type, msg.content, msg.id, msg.to) == ("bytes", b"hi", "1", "alice")
    assert msg.duplicate
    assert msg.extra == {"content_type": "x", "retained": True}
    not_text = Publication("alice", b"\xff", properties={"payload_format_indicator": 1})
    interpreted = protocol.interpret("message", not_text)
    assert interpreted is not None
    assert (interpreted.type, interpreted.content) == ("bytes", b"\xff")
    assert protocol.interpret("unhandled", frame) is None
