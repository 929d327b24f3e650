"""The data types of MQTT 5: integers, strings and properties, to bytes and back.

Reading raises `ProtocolError` for whatever the standard forbids, with the DISCONNECT that the
standard requires as its farewell. Writing raises `ValueError` for values that cannot be written.

The names of properties are those of the standard, in lower case; `user_property` and
`subscription_identifier` hold a list, because they may occur more than once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from struct import Struct
from typing import Any, Final

from .._errors import ProtocolError

#: Reads a value of a packet: the bytes, where it begins, and where the packet ends.
Reader = Callable[[bytes, int, int], tuple[Any, int]]
Writer = Callable[[Any], bytes]

ONE: Final = Struct("B")
TWO: Final = Struct(">H")
FOUR: Final = Struct(">I")
#: The largest number that a variable byte integer can hold.
LIMIT: Final = 268_435_455
#: Control characters and noncharacters. The standard allows a server to close the link for them, as
#: Mosquitto does; a send that is resumed would then close every link.
_UNFIT: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)


def broken(code: int, text: str) -> ProtocolError:
    """Return the error for a protocol violation, with a DISCONNECT of this reason code."""
    return ProtocolError(text, farewell=bytes((0xE0, 0x01, code)))


def malformed(text: str) -> ProtocolError:
    """Return the error for a malformed packet."""
    return broken(0x81, text)


# -- writing ---------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    """A variable byte integer."""
    if value < 0x80:
        return bytes((value,))
    if value > LIMIT:
        raise ValueError(f"{value} is more than a packet can hold ({LIMIT})")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text_field(value: str) -> bytes:
    """A string with its length."""
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has a lone surrogate, which UTF-8 cannot encode") from error
    check_characters(value, "it")
    return data_field(encoded)


def check_characters(text: str, what: str) -> None:
    """Raise `ValueError` for a string for which a server may close the link."""
    # Printable strings, which are nearly all, have none of these.
    if text.isprintable() or not _UNFIT.search(text):
        return
    if "\0" in text:
        raise ValueError(f"{what} has a NUL character, which MQTT does not allow")
    raise ValueError(
        f"{what} has a control character, such as a line feed, or a noncharacter: a server may "
        "close the link for it"
    )


def data_field(value: bytes) -> bytes:
    """Bytes with their length."""
    if len(value) > 0xFFFF:
        raise ValueError(f"it has {len(value)} bytes, and MQTT allows 65535")
    return TWO.pack(len(value)) + value


# -- reading ---------------------------------------------------------------------------------------


def read_number(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A variable byte integer, and where it ends."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift and not byte:
                raise malformed("a length is not in its shortest form")
            return value, at
        shift += 7
        if shift > 21:
            raise malformed("a length of more than four bytes")
    raise malformed("a length that exceeds its packet")


def read_text(data: bytes, at: int, end: int) -> tuple[str, int]:
    """A string, and where it ends."""
    value, at = read_data(data, at, end)
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise malformed("a string that is not UTF-8") from None
    if "\0" in text:
        raise malformed("a string with a NUL character")
    return text, at


def read_data(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """Bytes, and where they end."""
    start = at + 2
    if start > end:
        raise malformed("a string that exceeds its packet")
    at = start + (data[at] << 8 | data[at + 1])
    if at > end:
        raise malformed("a string that exceeds its packet")
    return data[start:at], at


def _fixed(shape: Struct) -> Reader:
    def read(data: bytes, at: int, end: int) -> tuple[int, int]:
        if at + shape.size > end:
            raise malformed("a property that exceeds its packet")
        return shape.unpack_from(data, at)[0], at + shape.size

    return read


_read_byte = _fixed(ONE)


def _read_flag(data: bytes, at: int, end: int) -> tuple[int, int]:
    value, at = _read_byte(data, at, end)
    if value > 1:
        raise broken(0x82, "a property that must be 0 or 1 has another value")
    return value, at


def _read_pair(data: bytes, at: int, end: int) -> tuple[tuple[str, str], int]:
    name, at = read_text(data, at, end)
    value, at = read_text(data, at, end)
    return (name, value), at


# -- properties ------------------------------------------------------------------------------------


class Kind(Enum):
    """How the value of a property is written."""

    FLAG = (_read_flag, lambda value: bytes((bool(value),)))
    TWO = (_fixed(TWO), TWO.pack)
    FOUR = (_fixed(FOUR), FOUR.pack)
    NUMBER = (read_number, number)
    TEXT = (read_text, text_field)
    DATA = (read_data, data_field)
    PAIR = (_read_pair, lambda pair: text_field(pair[0]) + text_field(pair[1]))


USER_PROPERTY = 0x26
SUBSCRIPTION = 0x0B

PROPERTIES: Final[dict[int, tuple[str, Kind]]] = {
    0x01: ("payload_format_indicator", Kind.FLAG),
    0x02: ("message_expiry_interval", Kind.FOUR),
    0x03: ("content_type", Kind.TEXT),
    0x08: ("response_topic", Kind.TEXT),
    0x09: ("correlation_data", Kind.DATA),
    SUBSCRIPTION: ("subscription_identifier", Kind.NUMBER),
    0x11: ("session_expiry_interval", Kind.FOUR),
    0x12: ("assigned_client_identifier", Kind.TEXT),
    0x13: ("server_keep_alive", Kind.TWO),
    0x15: ("authentication_method", Kind.TEXT),
    0x16: ("authentication_data", Kind.DATA),
    0x17: ("request_problem_information", Kind.FLAG),
    0x18: ("will_delay_interval", Kind.FOUR),
    0x19: ("request_response_information", Kind.FLAG),
    0x1A: ("response_information", Kind.TEXT),
    0x1C: ("server_reference", Kind.TEXT),
    0x1F: ("reason_string", Kind.TEXT),
    0x21: ("receive_maximum", Kind.TWO),
    0x22: ("topic_alias_maximum", Kind.TWO),
    0x23: ("topic_alias", Kind.TWO),
    0x24: ("maximum_qos", Kind.FLAG),
    0x25: ("retain_available", Kind.FLAG),
    USER_PROPERTY: ("user_property", Kind.PAIR),
    0x27: ("maximum_packet_size", Kind.FOUR),
    0x28: ("wildcard_subscription_available", Kind.FLAG),
    0x29: ("subscription_identifier_available", Kind.FLAG),
    0x2A: ("shared_subscription_available", Kind.FLAG),
}
_NUMBERS: Final = {name: number for number, (name, _) in PROPERTIES.items()}
_READERS: Final[dict[int, tuple[str, Reader]]] = {
    identifier: (name, kind.value[0]) for identifier, (name, kind) in PROPERTIES.items()
}
#: The standard forbids zero for these.
_POSITIVE: Final = frozenset((SUBSCRIPTION, 0x21, 0x23, 0x27))


def properties(values: Mapping[str, Any]) -> bytes:
    """Properties with their length; a value of None is left out."""
    written = bare_properties(values)
    return number(len(written)) + written


def bare_properties(values: Mapping[str, Any]) -> bytes:
    """Properties without their length."""
    out = bytearray()
    for name, value in values.items():
        if value is None:
            continue
        identifier = _NUMBERS[name]
        write: Writer = PROPERTIES[identifier][1].value[1]
        many = identifier in (USER_PROPERTY, SUBSCRIPTION)
        for one in value if many else (value,):
            out.append(identifier)
            out += write(one)
    return bytes(out)


def read_properties(
    data: bytes, at: int, end: int, allowed: frozenset[int]
) -> tuple[dict[str, Any], int]:
    """Read the properties of a packet, and where they end; others than `allowed` are an error."""
    size, at = read_number(data, at, end)
    stop = at + size
    if stop > end:
        raise malformed("properties that exceed their packet")
    found: dict[str, Any] = {}
    while at < stop:
        identifier = data[at]
        if identifier not in allowed:
            raise malformed(f"property 0x{identifier:02X}, which is not allowed in this packet")
        name, read = _READERS[identifier]
        value, at = read(data, at + 1, stop)
        if identifier in _POSITIVE and not value:
            raise broken(0x82, f"the property {name} is 0")
        if identifier in (USER_PROPERTY, SUBSCRIPTION):
            found.setdefault(name, []).append(value)
        elif name in found:
            raise broken(0x82, f"the property {name} occurs twice")
        else:
            found[name] = value
    return found, at
