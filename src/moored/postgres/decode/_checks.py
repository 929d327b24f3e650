"""Check that the bytes of a value are valid for its type.

psycopg's loaders trust their input: for a value that is too short for its type, they read memory
beyond it. So values are checked first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod

import psycopg
from psycopg.types.multirange import MultirangeInfo
from psycopg.types.range import RangeInfo

__all__ = [
    "SIZES",
    "Check",
    "check_array",
    "check_multirange",
    "check_of",
    "check_range",
    "check_record",
    "text_check_of",
]

Check = Callable[[bytes], None]

_head = struct.Struct("!iiI").unpack_from
_size = struct.Struct("!i").unpack_from
_oid = struct.Struct("!I").unpack_from

#: The size of the binary values of types that psycopg loads, where it is fixed, by oid.
SIZES: dict[int, int] = {
    16: 1,  # bool
    21: 2,  # int2
    **dict.fromkeys((23, 26, 700, 1082), 4),  # int4, oid, float4, date
    **dict.fromkeys((20, 701, 1083, 1114, 1184), 8),  # int8, float8, time, timestamp(tz)
    1266: 12,  # timetz
    **dict.fromkeys((1186, 2950), 16),  # interval, uuid
}

_types = list(psycopg.adapters.types)
#: Braces, commas, and elements with or without quotes; braces and quotes open only at the begin of
#: an element.
_ARRAY_FORM = rb'\{(?:(?<=[{,])\{|[},]|[^"\\{},]|(?<=[{,])"(?:[^"\\]|\\.)*+"(?=[},]))*+'
#: box[]: its elements are separated by semicolons.
_BOXES = 1020
_ARRAYS = {each.array_oid: each.oid for each in _types if each.array_oid}
_RANGES = {each.oid: each.subtype_oid for each in _types if isinstance(each, RangeInfo)}
_MULTIRANGES = {each.oid: each.range_oid for each in _types if isinstance(each, MultirangeInfo)}


@cache
def check_of(oid: int) -> Check | None:
    """Return the check of a type's binary values, which raises ValueError; None if not needed."""
    if oid in SIZES:
        return partial(_check_size, SIZES[oid])
    if oid == 1700:
        return _check_numeric
    if oid in _ARRAYS:
        return partial(check_array, _ARRAYS[oid], check_of(_ARRAYS[oid]))
    if oid in _RANGES:
        return partial(check_range, check_of(_RANGES[oid]))
    if oid in _MULTIRANGES:
        return partial(check_multirange, check_of(_MULTIRANGES[oid]))
    return None


@cache
def text_check_of(oid: int, delimiter: str | None = None) -> Check | None:
    """Return the check of a type's values in text format; None if not needed.

    :param delimiter: what separates the elements of an array that is not built in.
    """
    if oid in _ARRAYS:
        delimiter = ";" if oid == _BOXES else ","
    if delimiter is None:
        return None
    form = _ARRAY_FORM.replace(b",", re.escape(delimiter.encode()))
    return partial(_check_text_array, re.compile(form, re.DOTALL))


def _check_text_array(form: re.Pattern[bytes], data: bytes) -> None:
    """Check the quoting: at a backslash outside of quotes, psycopg writes beyond its memory."""
    begin = data.find(b"=") + 1 if data[:1] == b"[" else 0
    if b"\\" in data and form.fullmatch(data, begin) is None:
        raise ValueError("it is an array with invalid quoting")


def _check_size(expected: int, data: bytes) -> None:
    if len(data) != expected:
        raise ValueError(f"it has {len(data)} bytes instead of {expected}")


def _check_numeric(data: bytes) -> None:
    digits = int.from_bytes(data[:2])
    if len(data) != 8 + 2 * digits:
        raise ValueError(f"it has {len(data)} bytes for {digits} groups of digits")


def check_array(element: int, check: Check | None, data: bytes) -> None:
    """Check an array, with the oid and the check of its elements."""
    try:
        dimensions, _, oid = _head(data)
        if not 0 <= dimensions <= 6 or oid != element:
            raise ValueError(f"it is an array of {dimensions} dimensions of oid {oid}")
        at = 12 + 8 * dimensions
        sizes = [_size(data, 12 + 8 * each)[0] for each in range(dimensions)]
        if min(sizes, default=0) < 0 or prod(sizes) > len(data) // 4:
            raise ValueError(f"it is an array of the sizes {sizes}")
        for _ in range(prod(sizes) if sizes else 0):
            at = _check_part(check, data, at)
    except struct.error:
        raise ValueError("it is a truncated array") from None
    _check_end(data, at)


def check_record(fields: Sequence[tuple[int, Check | None]], data: bytes) -> None:
    """Check a value of a composite type, with the oid and the check of each field."""
    try:
        (count,), at = _size(data), 4
        if count != len(fields):
            raise ValueError(f"it has {count} fields instead of {len(fields)}")
        for oid, check in fields:
            if _oid(data, at)[0] != oid:
                raise ValueError(f"a field of it is of oid {_oid(data, at)[0]} instead of {oid}")
            at = _check_part(check, data, at + 4)
    except struct.error:
        raise ValueError("it is a truncated record") from None
    _check_end(data, at)


def check_range(check: Check | None, data: bytes) -> None:
    """Check a range, with the check of its bounds."""
    if not data:
        raise ValueError("it is an empty value instead of a range")
    flags, at = data[0], 1
    empty, lower_infinite, upper_infinite = flags & 1, flags & 8, flags & 16
    try:
        for infinite in (lower_infinite, upper_infinite):
            if not empty and not infinite:
                at = _check_part(check, data, at, nullable=False)
    except struct.error:
        raise ValueError("it is a truncated range") from None
    _check_end(data, at)


def check_multirange(check: Check | None, data: bytes) -> None:
    """Check a multirange, with the check of its ranges."""
    try:
        (count,), at = _size(data), 4
        if not 0 <= count <= len(data) // 4:
            raise ValueError(f"it is a multirange of {count} ranges")
        for _ in range(count):
            at = _check_part(check, data, at, nullable=False)
    except struct.error:
        raise ValueError("it is a truncated multirange") from None
    _check_end(data, at)


def _check_part(check: Check | None, data: bytes, at: int, *, nullable: bool = True) -> int:
    """Check one element: its size, and so many bytes; return the offset after it."""
    size: int = _size(data, at)[0]
    at += 4
    if size == -1 and nullable:
        return at
    if not 0 <= size <= len(data) - at:
        raise ValueError(f"an element of it has the invalid size {size}")
    if check is not None:
        check(data[at : at + size])
    return at + size


def _check_end(data: bytes, at: int) -> None:
    if at != len(data):
        raise ValueError(f"it has {len(data) - at} extra bytes")
