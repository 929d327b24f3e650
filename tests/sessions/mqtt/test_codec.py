"""The codec, against packets from the standard and an independent codec."""

from __future__ import annotations

from typing import Any

import mqtt5
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties, VariableByteIntegers

from moored.sessions._errors import ProtocolError
from moored.sessions.mqtt import _codec, _packets
from moored.sessions.mqtt._codec import PROPERTIES, number, properties, read_number
from moored.sessions.mqtt._codec import read_properties as read
from moored.sessions.mqtt._packets import Message, Publication, Will
from moored.testing import scaled

FUZZ = settings(max_examples=scaled(300, least=12), deadline=None)
EVERY = frozenset(PROPERTIES)

texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), max_size=40)
topics = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="+#"),
    min_size=1,
    max_size=40,
)
packet_ids = st.integers(1, 0xFFFF)
pairs = st.lists(st.tuples(texts, texts), max_size=3)

#: From section 1.5.5 of the standard: the smallest and largest value of each length.
SIZES = [
    (0, "00"),
    (127, "7f"),
    (128, "80 01"),
    (16_383, "ff 7f"),
    (16_384, "80 80 01"),
    (2_097_151, "ff ff 7f"),
    (2_097_152, "80 80 80 01"),
    (268_435_455, "ff ff ff 7f"),
]


@pytest.mark.parametrize(("value", "written"), SIZES)
def test_variable_byte_integers_match_the_standard(value: int, written: str) -> None:
    data = bytes.fromhex(written)
    assert number(value) == data == VariableByteIntegers.encode(value)  # type: ignore[no-untyped-call]
    assert read_number(b"?" + data + b"?", 1, 1 + len(data)) == (value, 1 + len(data))


@pytest.mark.parametrize(
    "written", ["80", "80 80 80 80 01", "ff ff ff ff 7f", "80 00", "", "81 00"]
)
def test_invalid_variable_byte_integer_is_malformed(written: str) -> None:
    data = bytes.fromhex(written)
    with pytest.raises(ProtocolError) as caught:
        read_number(data, 0, len(data))
    assert caught.value.farewell == b"\xe0\x01\x81"


def test_length_above_the_limit_of_the_standard_is_refused() -> None:
    with pytest.raises(ValueError, match="268435456 is more than a packet can hold"):
        number(268_435_456)


# -- golden packets ----------------------------------------------------------------------------


def test_connect_packet_has_the_expected_bytes() -> None:
    written = _packets.connect(
        "alice",
        keepalive=30,
        clean_start=True,
        values={"session_expiry_interval": 10, "receive_maximum": None},
        username="u",
        password=b"\xff",
        will=Will("w/t", "bye", qos=1, retain=True, delay=5),
        will_topic="w/t",
    )
    expected = (
        "10 2f 0004 4d515454 05 ee 001e"
        "05 11 0000000a"  # session expiry
        "0005 616c696365"
        "07 18 00000005 0101"  # the will's delay, and its payload format
        "0003 772f74 0003 627965"
        "0001 75 0001 ff"
    )
    assert written == bytes.fromhex(expected)


def test_publish_subscribe_and_short_packets_have_the_expected_bytes() -> None:
    published = "32 1a 0003 612f62 0007 10 26 000a 6d6573736167652d6964 0001 31 6869"
    assert _packets.publish(b"a/b", 7, "1", b"hi") == bytes.fromhex(published)
    assert _packets.subscribe(10, ["a/b"]) == bytes.fromhex("82 09 000a 00 0003 612f62 11")
    assert _packets.answer(_packets.PUBACK, 0x1234) == bytes.fromhex("40 02 1234")
    assert _packets.answer(_packets.PUBREL, 1, 0x92) == bytes.fromhex("62 03 0001 92")
    assert _packets.disconnect() == bytes.fromhex("e0 00")
    assert _packets.disconnect(4) == bytes.fromhex("e0 01 04")
    assert bytes.fromhex("c0 00") == _packets.PINGREQ


def test_connack_is_parsed() -> None:
    data = bytes.fromhex("01 00 0b 21 0014 13 000a 27 000003e8")
    present, code, options = _packets.read_connack(data, 0, len(data))
    assert (present, code) == (True, 0)
    assert options == {"receive_maximum": 20, "server_keep_alive": 10, "maximum_packet_size": 1000}


def test_connack_of_an_older_version_is_unsupported_protocol_version() -> None:
    assert _packets.read_connack(b"\x00\x01", 0, 2)[1] == 0x84


# -- properties --------------------------------------------------------------------------------

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BYTE": st.integers(0, 255),
    "FLAG": st.integers(0, 1),
    "TWO": st.integers(1, 0xFFFF),
    "FOUR": st.integers(1, 0xFFFFFFFF),
    "TEXT": texts,
    "DATA": st.binary(max_size=40),
}


def _values_of(name: str, kind: str) -> st.SearchStrategy[Any]:
    if name == "user_property":
        return st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
    if name == "subscription_identifier":
        return st.lists(st.integers(1, 268_435_455), min_size=1, max_size=3)
    return _VALUES[kind]


@FUZZ
@given(
    st.fixed_dictionaries(
        {}, optional={name: _values_of(name, kind.name) for name, kind in PROPERTIES.values()}
    )
)
def test_properties_survive_encoding_and_decoding(values: dict[str, Any]) -> None:
    data = b"?" + properties(values) + b"?"
    assert read(data, 1, len(data) - 1, EVERY) == (values, len(data) - 1)


def test_identifiers_and_types_of_properties_match_another_codec() -> None:
    theirs: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    assert {name.replace(" ", "").lower() for name in theirs.names} == {
        name.replace("_", "") for name, _ in PROPERTIES.values()
    }
    for name, identifier in theirs.names.items():
        ours, kind = PROPERTIES[identifier]
        assert ours.replace("_", "") == name.replace(" ", "").lower()
        form = theirs.types[theirs.properties[identifier][0]]
        expected = {
            "BYTE": "Byte",
            "FLAG": "Byte",
            "TWO": "Two Byte Integer",
            "FOUR": "Four Byte Integer",
            "NUMBER": "Variable Byte Integer",
            "DATA": "Binary Data",
            "TEXT": "UTF-8 Encoded String",
            "PAIR": "UTF-8 String Pair",
        }
        assert form == expected[kind.name], ours


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("02 21 00", 0x81),  # cut off
        ("03 21 0000", 0x82),  # must not be 0
        ("06 21 0001 21 0001", 0x82),  # twice
        ("02 25 02", 0x82),  # neither 0 nor 1
        ("01 7f", 0x81),  # no such property
        ("05 21 0001", 0x81),  # longer than the packet
        ("04 1f 0001 00", 0x81),  # NUL
        ("04 1f 0001 ff", 0x81),  # not UTF-8
        ("06 1f 0003 eda080", 0x81),  # half a surrogate pair
        ("05 26 0001 61 00", 0x81),  # half a pair
    ],
)
def test_malformed_properties_are_refused_with_the_right_code(written: str, code: int) -> None:
    data = bytes.fromhex(written)
    with pytest.raises(ProtocolError) as caught:
        read(data, 0, len(data), EVERY)
    assert caught.value.farewell == bytes((0xE0, 1, code))


def test_property_of_another_packet_is_refused() -> None:
    data = properties({"topic_alias": 1})
    with pytest.raises(ProtocolError, match="property 0x23, which is not allowed in this packet"):
        _packets.read_result(b"\x00\x01\x00" + data, 0, 3 + len(data))


def test_invalid_strings_and_payloads_are_refused() -> None:
    for text, why in (("a\0b", "NUL"), ("\ud800", "surrogate"), ("x" * 65536, "65536 bytes")):
        with pytest.raises(ValueError, match=why):
            _codec.text_field(text)
    with pytest.raises(ValueError, match="NUL"):
        _packets.publish(b"a", 1, "a\0", b"")
    with pytest.raises(TypeError, match="int is not bytes"):
        _packets.as_bytes(5)


def test_characters_that_brokers_refuse_are_refused() -> None:
    last_two = {plane << 16 | low for plane in range(17) for low in (0xFFFE, 0xFFFF)}
    # Below full scale only some of those beyond the BMP.
    beyond = range(0x10000, 0x110000, max(1, 64 // scaled(64)))
    points = {*range(0xD800), *range(0xE000, 0x10000), *beyond, *last_two}
    refused = set()
    for point in points:
        try:
            _codec.check_characters(chr(point), "it")
        except ValueError:
            refused.add(point)
    controls = {*range(0x20), *range(0x7F, 0xA0)}
    assert refused == controls | last_two | set(range(0xFDD0, 0xFDF0))
    for topic, id in ((b"a\nb", "1"), (b"a", "1\t")):
        with pytest.raises(ValueError, match="control character"):
            _packets.publish(topic, 1, id, b"")
    with pytest.raises(ValueError, match="control character"):
        _codec.bare_properties({"content_type": "a\n"})


# -- against an independent codec --------------------------------------------------------------


def test_lengths_at_the_byte_boundaries_are_correct() -> None:
    sizes = [*range(95, 120), *range(16_340, 16_390), 2_097_152]
    for id_size in (1, 112, 113, 300):
        for size in sizes:
            data = _packets.publish(b"a/b", 7, "i" * id_size, bytes(size))
            theirs, length = mqtt5.read(memoryview(data))
            assert isinstance(theirs, mqtt5.PublishPacket)
            assert (length, len(theirs.payload)) == (len(data), size)
            assert theirs.user_properties == [("message-id", "i" * id_size)]


@FUZZ
@given(topics, packet_ids, texts, st.binary(max_size=300), st.booleans(), pairs)
def test_another_codec_reads_our_publish(
    topic: str, packet_id: int, id: str, payload: bytes, rich: bool, user: list[tuple[str, str]]
) -> None:
    more = b""
    if rich:
        message = Message(b"", False, 7, "text", "answers", b"\0", tuple(user))
        more = _packets.more_properties(message, True)
    data = _packets.publish(topic.encode(), packet_id, id, payload, more)
    theirs, size = mqtt5.read(memoryview(data))
    assert size == len(data)
    assert isinstance(theirs, mqtt5.PublishPacket)
    assert (theirs.topic, theirs.packet_id, theirs.payload) == (topic, packet_id, payload)
    assert (theirs.qos, theirs.duplicate, theirs.retain) == (1, False, False)
    assert theirs.user_properties == [("message-id", id), *(user if rich else [])]
    if rich:
        assert (theirs.message_expiry_interval, theirs.content_type) == (7, "text")
        assert (theirs.response_topic, theirs.correlation_data) == ("answers", b"\0")
    assert theirs.payload_format_indicator == rich


@FUZZ
@given(
    topics,
    st.binary(max_size=300),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    packet_ids,
    st.none() | texts,
    pairs,
    st.lists(st.integers(1, 1000), max_size=2),
)
def test_publish_of_another_codec_is_read(
    topic: str,
    payload: bytes,
    qos: int,
    retain: bool,
    duplicate: bool,
    packet_id: int,
    content_type: str | None,
    user: list[tuple[str, str]],
    subscriptions: list[int],
) -> None:
    theirs = mqtt5.PublishPacket(
        topic,
        payload,
        qos=mqtt5.QoS(qos),
        retain=retain,
        duplicate=duplicate and qos > 0,
        packet_id=packet_id if qos else None,
        content_type=content_type,
        user_properties=user,
        subscription_ids=subscriptions,
    )
    data = theirs.write()
    _, start = read_number(data, 1, len(data))
    number, ours = _packets.read_publish(data[0], data, start, len(data))
    assert number == (packet_id if qos else 0)
    options = dict(ours.properties)
    assert options.pop("user_property", []) == user
    assert options.pop("subscription_identifier", []) == subscriptions
    assert options.pop("content_type", None) == content_type
    assert not options
    ids = [value for name, value in user if name == "message-id"]
    expected = Publication(
        topic, payload, ids[0] if ids else None, duplicate and qos > 0, retain, ours.properties
    )
    assert ours == expected


@FUZZ
@given(
    st.booleans(), packet_ids, packet_ids, st.none() | packet_ids, st.none() | texts, st.booleans()
)
def test_connack_of_another_codec_is_read(
    present: bool,
    receive: int,
    keepalive: int,
    size: int | None,
    reason: str | None,
    retain: bool,
) -> None:
    data = mqtt5.ConnAckPacket(
        session_present=present,
        receive_max=receive,
        server_keep_alive=keepalive,
        max_packet_size=size,
        reason_str=reason,
        retain_available=retain,
        max_qos=mqtt5.QoS.AT_LEAST_ONCE,
    ).write()
    _, start = read_number(data, 1, len(data))
    is_present, _, ours = _packets.read_connack(data, start, len(data))
    assert is_present is present
    assert ours.get("receive_maximum", 65535) == receive
    assert ours["server_keep_alive"] == keepalive
    assert ours.get("maximum_packet_size") == size
    assert ours.get("reason_string") == reason
    assert bool(ours.get("retain_available", 1)) is retain
    assert ours["maximum_qos"] == 1


@FUZZ
@given(
    texts,
    st.integers(0, 0xFFFF),
    st.booleans(),
    st.none() | texts,
    st.none() | st.binary(max_size=40),
    st.none()
    | st.builds(
        Will,
        topics,
        st.binary(max_size=20),
        qos=st.integers(0, 2),
        retain=st.booleans(),
        delay=st.integers(0, 99),
    ),
)
def test_another_codec_reads_our_connect(
    client_id: str,
    keepalive: int,
    clean: bool,
    username: str | None,
    password: bytes | None,
    will: Will | None,
) -> None:
    data = _packets.connect(
        client_id,
        keepalive=keepalive,
        clean_start=clean,
        values={"session_expiry_interval": 7, "maximum_packet_size": 1000},
        username=username,
        password=password,
        will=will,
        will_topic=will.topic if will else "",
    )
    theirs, size = mqtt5.read(memoryview(data))
    assert size == len(data)
    assert isinstance(theirs, mqtt5.ConnectPacket)
    assert (theirs.client_id, theirs.keep_alive, theirs.clean_start) == (
        client_id,
        keepalive,
        clean,
    )
    assert (theirs.username, theirs.password) == (username, password)
    assert (theirs.session_expiry_interval, theirs.max_packet_size) == (7, 1000)
    assert (theirs.will is None) is (will is None)
    if will is not None and theirs.will is not None:
        assert (theirs.will.topic, theirs.will.qos, theirs.will.retain) == (
            will.topic,
            will.qos,
            will.retain,
        )
        assert theirs.will.payload in (will.payload, None)
        assert theirs.will.will_delay_interval == will.delay
