"""The packets of MQTT 5 that a client writes, and those that it reads.

The code for PUBLISH and PUBACK is optimised; the other packets are rare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moored.kernel import refuse

from .._errors import SessionError
from ._codec import (
    LIMIT,
    TWO,
    bare_properties,
    broken,
    check_characters,
    data_field,
    malformed,
    number,
    properties,
    read_properties,
    read_text,
    text_field,
)

__all__ = ["Message", "MessageTooLarge", "Publication", "SubscriptionRefused", "Will"]

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 0x20, 0x30, 0x40, 0x50, 0x62, 0x70
SUBACK, UNSUBACK, PINGRESP, DISCONNECT = 0x90, 0xB0, 0xD0, 0xE0
#: The size of the largest possible packet.
LARGEST: Final = LIMIT + 5
#: The largest number of seconds in a property; for the session expiry, "never".
LONGEST: Final = 0xFFFFFFFF
PINGREQ: Final = b"\xc0\x00"
DUPLICATE: Final = 0x08

#: The user property that holds the id of a send, by which receivers recognise duplicates.
ID_PROPERTY: Final = "message-id"
_ID_FIELD: Final = b"\x26" + text_field(ID_PROPERTY)
_NOTHING: Final[Mapping[str, Any]] = {}
#: The property that marks a payload as text.
TEXT_MARK: Final = b"\x01\x01"


@dataclass(frozen=True, slots=True)
class Publication:
    """A received message."""

    topic: str
    payload: bytes = field(repr=False)
    #: The sender's id, if it has one; a duplicate has the same.
    id: str | None = None
    #: Whether the server has sent it before, over a link that was lost.
    duplicate: bool = False
    #: Whether it is a retained message, older than the subscription.
    retained: bool = False
    #: By their names in the standard, in lower case; `user_property` is a list of pairs.
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """A payload with MQTT properties, as content of `send`."""

    payload: bytes | str = field(repr=False)
    #: Whether the server retains it for later subscribers.
    retain: bool = False
    #: Seconds after which the server drops it if it is not delivered.
    expiry: int | None = None
    content_type: str | None = None
    #: The topic for a response, and the data that the response must carry.
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        wrong = [*_wrong_payload(self.payload), *_wrong_seconds(expiry=self.expiry)]
        answer = self.response_topic
        if answer is not None and (not answer or "+" in answer or "#" in answer):
            wrong.append(f"response_topic={answer!r} must not be empty or have wildcards")
        refuse("Message", wrong)


class MessageTooLarge(SessionError):
    """The broker sent a message that is larger than `max_packet_size`; its payload was dropped."""

    def __init__(self, topic: str, size: int, limit: int) -> None:
        super().__init__(
            f"a message to {topic!r} has {size} bytes with its header; max_packet_size={limit}: "
            "its payload was dropped; raise max_packet_size to receive such messages"
        )
        self.topic = topic
        self.size = size
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SubscriptionRefused:
    """The server refuses a subscription; the data of the event `subscription_refused`."""

    topic: str
    #: The reason code of MQTT.
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Will:
    """A message that the server publishes when the client vanishes without a DISCONNECT."""

    #: May contain `{profile}`.
    topic: str
    payload: bytes | str = field(default=b"", repr=False)
    qos: int = 1
    retain: bool = False
    #: Seconds that the server waits for the client to reconnect first.
    delay: int = 0
    expiry: int | None = None
    content_type: str | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    #: Whether it is also published after a DISCONNECT.
    on_goodbye: bool = False

    def __post_init__(self) -> None:
        wrong = [
            *_wrong_payload(self.payload),
            *_wrong_seconds(delay=self.delay, expiry=self.expiry),
        ]
        if self.qos not in (0, 1, 2):
            wrong.append(f"qos={self.qos!r} must be 0, 1 or 2")
        refuse("Will", wrong)


def _wrong_payload(payload: Any) -> Iterator[str]:
    try:
        as_bytes(payload)
    except TypeError as error:
        yield str(error)
    except UnicodeEncodeError:
        yield "payload has a lone surrogate, which UTF-8 cannot encode"


def _wrong_seconds(**values: Any) -> Iterator[str]:
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int):
            yield f"{name}={value!r} must be a whole number of seconds"
        elif not 0 <= value <= LONGEST:
            yield f"{name}={value!r} must be from 0 to {LONGEST} seconds"


# -- writing ---------------------------------------------------------------------------------------


def packet(first: int, *parts: bytes) -> bytes:
    """Return a packet with its header."""
    body = b"".join(parts)
    return b"".join((bytes((first,)), number(len(body)), body))


def connect(
    client_id: str,
    *,
    keepalive: int,
    clean_start: bool,
    values: Mapping[str, Any],
    username: str | None = None,
    password: bytes | None = None,
    will: Will | None = None,
    will_topic: str = "",
) -> bytes:
    """Return a CONNECT."""
    flags = clean_start << 1
    payload = [text_field(client_id)]
    if will is not None:
        flags |= 0x04 | will.qos << 3 | will.retain << 5
        body, is_text = as_bytes(will.payload)
        options = {
            "will_delay_interval": will.delay or None,
            "payload_format_indicator": is_text or None,
            "message_expiry_interval": will.expiry,
            "content_type": will.content_type,
            "user_property": will.user_properties,
        }
        payload += [properties(options), text_field(will_topic), data_field(body)]
    if username is not None:
        flags |= 0x80
        payload.append(text_field(username))
    if password is not None:
        flags |= 0x40
        payload.append(data_field(password))
    head = b"\x00\x04MQTT\x05" + bytes((flags,)) + TWO.pack(keepalive)
    return packet(0x10, head, properties(values), *payload)


def as_bytes(payload: Any) -> tuple[bytes, bool]:
    """Return a payload as bytes, and whether it is text."""
    if isinstance(payload, str):
        return payload.encode(), True
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"{type(payload).__name__} is not bytes, str or a Message")
    return bytes(payload), False


def publish(topic: bytes, packet_id: int, id: str, payload: bytes, more: bytes = b"") -> bytes:
    """Return a PUBLISH with QoS 1; `more` are further properties."""
    check_characters(topic.decode(), "the topic")
    check_characters(id, "its id")
    name = id.encode()
    size = 15 + len(name) + len(more)
    length = 5 + len(topic) + size + len(payload)
    if size < 0x80 and length < 0x4000:  # the usual case: both lengths without a loop
        head = (0x32, length) if length < 0x80 else (0x32, length & 0x7F | 0x80, length >> 7)
        return b"".join(
            (
                bytes(head),
                TWO.pack(len(topic)),
                topic,
                bytes((packet_id >> 8, packet_id & 0xFF, size)),
                _ID_FIELD,
                TWO.pack(len(name)),
                name,
                more,
                payload,
            )
        )
    options = number(size) + _ID_FIELD + data_field(name) + more
    return packet(0x32, data_field(topic), TWO.pack(packet_id), options, payload)


def more_properties(message: Message, is_text: bool) -> bytes:
    """Return the properties of a message besides its id, without their length."""
    return bare_properties(
        {
            "payload_format_indicator": is_text or None,
            "message_expiry_interval": message.expiry,
            "content_type": message.content_type,
            "response_topic": message.response_topic,
            "correlation_data": message.correlation_data,
            "user_property": message.user_properties,
        }
    )


def answer(kind: int, packet_id: int, code: int = 0) -> bytes:
    """Return a PUBACK, PUBREC, PUBREL or PUBCOMP."""
    if code:
        return bytes((kind, 3, packet_id >> 8, packet_id & 0xFF, code))
    return bytes((kind, 2, packet_id >> 8, packet_id & 0xFF))


def subscribe(packet_id: int, filters: Sequence[str]) -> bytes:
    """Return a SUBSCRIBE with QoS 1; retained messages are sent only if the filter is new."""
    wanted = [text_field(one) + b"\x11" for one in filters]
    return packet(0x82, TWO.pack(packet_id), b"\x00", *wanted)


def unsubscribe(packet_id: int, filters: Sequence[str]) -> bytes:
    """Return an UNSUBSCRIBE."""
    return packet(0xA2, TWO.pack(packet_id), b"\x00", *(text_field(one) for one in filters))


def disconnect(code: int = 0) -> bytes:
    """Return a DISCONNECT."""
    return bytes((0xE0, 0x01, code)) if code else b"\xe0\x00"


# -- reading ---------------------------------------------------------------------------------------

_COMMON = frozenset((0x1F, 0x26))
_IN_CONNACK = _COMMON | frozenset(
    (0x11, 0x12, 0x13, 0x15, 0x16, 0x1A, 0x1C, 0x21, 0x22, 0x24, 0x25, 0x27, 0x28, 0x29, 0x2A)
)
_IN_PUBLISH = frozenset((0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26))
_IN_DISCONNECT = _COMMON | frozenset((0x1C,))


def _done(at: int, end: int) -> None:
    if at != end:
        raise malformed(f"a packet with {end - at} bytes too many")


def read_connack(data: bytes, at: int, end: int) -> tuple[bool, int, Mapping[str, Any]]:
    """Read a CONNACK: whether a session is present, its reason code and properties."""
    if end - at < 2:
        raise malformed("a CONNACK that is too short")
    flags, code = data[at], data[at + 1]
    if flags > 1:
        raise malformed("a CONNACK with flags that are reserved")
    if end - at == 2 and 0 < code < 6:
        # A server that only supports older versions refuses with their codes.
        return False, 0x84, _NOTHING
    found, at = read_properties(data, at + 2, end, _IN_CONNACK)
    _done(at, end)
    if flags and code:
        raise broken(0x82, "a refused connection with a session")
    return bool(flags), code, found


def read_result(data: bytes, at: int, end: int) -> tuple[int, int, Mapping[str, Any]]:
    """Read a PUBACK, PUBREC, PUBREL or PUBCOMP: packet id, reason code and properties."""
    if end - at < 2:
        raise malformed("an acknowledgement without a packet id")
    packet_id = data[at] << 8 | data[at + 1]
    if not packet_id:
        raise broken(0x82, "an acknowledgement of packet 0")
    return packet_id, *_read_reason(data, at + 2, end, _COMMON)


def read_suback(data: bytes, at: int, end: int) -> tuple[int, bytes]:
    """Read a SUBACK or UNSUBACK: the packet id, and a code for each filter."""
    if end - at < 3:
        raise malformed("a SUBACK that is too short")
    packet_id = data[at] << 8 | data[at + 1]
    _, at = read_properties(data, at + 2, end, _COMMON)
    return packet_id, data[at:end]


def read_disconnect(data: bytes, at: int, end: int) -> tuple[int, Mapping[str, Any]]:
    """Read a DISCONNECT: its reason code and properties."""
    return _read_reason(data, at, end, _IN_DISCONNECT)


def _read_reason(
    data: bytes, at: int, end: int, allowed: frozenset[int]
) -> tuple[int, Mapping[str, Any]]:
    """Read a reason code and properties, up to the end; both may be missing."""
    if end - at < 2:
        return (data[at] if at < end else 0), _NOTHING
    found, stop = read_properties(data, at + 1, end, allowed)
    _done(stop, end)
    return data[at], found


def read_address(first: int, data: bytes, at: int, end: int) -> tuple[str, int, int]:
    """Read the topic of a PUBLISH, its packet id (0 with QoS 0), and where that ends."""
    qos = first >> 1 & 3
    if qos == 3 or (first & DUPLICATE and not qos):
        raise malformed("a PUBLISH with contradictory flags")
    topic, at = read_text(data, at, end)
    if "#" in topic or "+" in topic:
        raise malformed("a topic with wildcards")
    packet_id = 0
    if qos:
        if end - at < 2:
            raise malformed("a PUBLISH without a packet id")
        packet_id = data[at] << 8 | data[at + 1]
        at += 2
        if not packet_id:
            raise broken(0x82, "a PUBLISH with packet id 0")
    return topic, packet_id, at


def read_publish(first: int, data: bytes, at: int, end: int) -> tuple[int, Publication]:
    """Read a PUBLISH: its packet id (0 with QoS 0), and the message."""
    topic, packet_id, at = read_address(first, data, at, end)
    if at < end and not data[at]:
        found, at = _NOTHING, at + 1
    else:
        found, at = read_properties(data, at, end, _IN_PUBLISH)
        if "topic_alias" in found:
            raise broken(0x94, "a topic alias, but none are allowed")
    if not topic:
        raise broken(0x82, "a PUBLISH without a topic")
    id = None
    for name, value in found.get("user_property", ()):
        if name == ID_PROPERTY:
            id = value
            break
    duplicate, retained = bool(first & DUPLICATE), bool(first & 1)
    return packet_id, Publication(topic, data[at:end], id, duplicate, retained, found)
