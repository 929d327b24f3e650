"""Convert values in binary format to the text that PostgreSQL would write.

This is for types without a Python equivalent, and for values that Python cannot represent, so that
a consumer gets the same with both formats. The functions expect values of a valid size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

__all__ = [
    "BY_OID",
    "date_text",
    "interval_text",
    "time_text",
    "timestamp_text",
    "timetz_text",
    "versioned_text",
]

_DAY = 86_400_000_000
_START = date(2000, 1, 1)
#: The Gregorian calendar repeats after so many days, which are 400 years.
_CYCLE = 146_097


# -- numbers and shapes --------------------------------------------------------------------------


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    shortest = _shortest(value)
    if not value or -4 <= shortest.adjusted() < 15:
        return f"{shortest:f}"
    digits, _, power = f"{shortest:e}".partition("e")
    return f"{digits}e{int(power):+03d}"


def _shortest(value: float) -> Decimal:
    """Return the shortest decimal that PostgreSQL reads back as this float.

    A decimal half-way between two floats is read as the even one by Python; PostgreSQL avoids it.
    """
    found = Decimal(repr(value)).normalize()
    neighbours = math.nextafter(value, math.inf), math.nextafter(value, -math.inf)
    middles = [(Fraction(value) + Fraction(n)) / 2 for n in neighbours if math.isfinite(n)]
    digits = len(found.as_tuple().digits)
    while Fraction(found) in middles:
        found = Decimal(f"{value:.{digits}e}")
        digits += 1
    return found


def _floats(data: bytes, at: int = 0) -> list[str]:
    return [_float(value) for (value,) in struct.iter_unpack("!d", data[at:])]


def _points(data: bytes, at: int = 0) -> str:
    numbers = iter(_floats(data, at))
    return ",".join(f"({x},{y})" for x, y in zip(numbers, numbers, strict=True))


def _line(data: bytes) -> str:
    return f"{{{','.join(_floats(data))}}}"


def _circle(data: bytes) -> str:
    return f"<{_points(data[:16])},{_floats(data, 16)[0]}>"


def _counted_points(data: bytes, at: int) -> str:
    (count,) = struct.unpack_from("!i", data, at)
    if len(data) != at + 4 + 16 * count:
        raise ValueError(f"{count} points do not fit in {len(data)} bytes")
    return _points(data, at + 4)


def _path(data: bytes) -> str:
    points = _counted_points(data, 1)
    return f"({points})" if data[0] else f"[{points}]"


def _money(data: bytes) -> str:
    # The format depends on the server's lc_monetary; this is the default.
    cents = int.from_bytes(data, signed=True)
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def _bits(data: bytes) -> str:
    (count,) = struct.unpack_from("!i", data)
    if count < 0 or len(data) != 4 + (count + 7) // 8:
        raise ValueError(f"{count} bits do not fit in {len(data)} bytes")
    return "".join(f"{byte:08b}" for byte in data[4:])[:count]


# -- identifiers and vectors ---------------------------------------------------------------------


def _number(data: bytes) -> str:
    return str(int.from_bytes(data))


def _address(data: bytes) -> str:
    return data.hex(":")


def _lsn(data: bytes) -> str:
    return f"{int.from_bytes(data[:4]):X}/{int.from_bytes(data[4:]):X}"


def _tid(data: bytes) -> str:
    return f"({int.from_bytes(data[:4])},{int.from_bytes(data[4:])})"


def _char(data: bytes) -> str:
    """Return the text of a "char": empty for zero, three octal digits for non-ASCII bytes."""
    byte = data[0]
    return f"\\{byte:03o}" if byte >= 128 else chr(byte) if byte else ""


def versioned_text(data: bytes) -> str:
    """Return the text after a version byte: jsonb and jsonpath."""
    if data[:1] != b"\x01":
        raise ValueError("it has an unknown version")
    return data[1:].decode()


def _vector(data: bytes) -> str:
    """Return the text of an int2vector or oidvector: numbers with spaces in between."""
    dimensions, _, element = struct.unpack_from("!iiI", data)
    layout = struct.Struct("!ih" if element == 21 else "!iI")
    return " ".join(str(value) for _, value in layout.iter_unpack(data[12 + 8 * dimensions :]))


def _snapshot(data: bytes) -> str:
    (count,) = struct.unpack_from("!i", data)
    first, last, *running = struct.unpack(f"!{count + 2}Q", data[4:])
    return f"{first}:{last}:{','.join(map(str, running))}"


# -- text search ---------------------------------------------------------------------------------


def _word(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    text = data[at:end].decode().replace("\\", "\\\\").replace("'", "''")
    return f"'{text}'", end + 1


def _tsvector(data: bytes) -> str:
    (count,), at, words = struct.unpack_from("!i", data), 4, []
    for _ in range(count):
        word, at = _word(data, at)
        (places,) = struct.unpack_from("!H", data, at)
        found = struct.unpack_from(f"!{places}H", data, at + 2)
        at += 2 + 2 * places
        marks = ",".join(f"{place & 0x3FFF}{'_CBA'[place >> 14].strip('_')}" for place in found)
        words.append(f"{word}:{marks}" if marks else word)
    if at != len(data):
        raise ValueError("a tsvector has extra bytes")
    return " ".join(words)


_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {_OR: 1, _AND: 2, _PHRASE: 3, _NOT: 4}


def _tsquery(data: bytes) -> str:
    (count,) = struct.unpack_from("!i", data)
    items = _query_items(data, count)
    text = _query(items, 0, False) if count else ""
    if next(items, None) is not None:
        raise ValueError("a tsquery has extra items")
    return text


def _query_items(data: bytes, count: int) -> Iterator[tuple[int, int, str]]:
    """Yield the items: an operator with its distance, or 0 and the text of a lexeme."""
    at = 4
    for _ in range(count):
        if data[at] == 1:
            weights, prefix = data[at + 1], data[at + 2]
            word, at = _word(data, at + 3)
            marks = ("*" if prefix else "") + "".join(
                letter for bit, letter in enumerate("DCBA") if weights >> bit & 1
            )[::-1]
            yield 0, 0, f"{word}:{marks}" if marks else word
            continue
        operator, distance = data[at + 1], 0
        at += 2
        if operator == _PHRASE:
            (distance,) = struct.unpack_from("!h", data, at)
            at += 2
        yield operator, distance, ""
    if at != len(data):
        raise ValueError("a tsquery has extra bytes")


def _query(items: Iterator[tuple[int, int, str]], parent: int, after_phrase: bool) -> str:
    """Return the text of the next operator with its operands, of which the right one is first."""
    operator, distance, word = next(items)
    if not operator:
        return word
    priority = _PRIORITY[operator]
    if operator == _NOT:
        text = f"!{_query(items, priority, False)}"
    else:
        right = _query(items, priority, operator == _PHRASE)
        left = _query(items, priority, False)
        sign = {_OR: "|", _AND: "&", _PHRASE: "<->" if distance == 1 else f"<{distance}>"}
        text = f"{left} {sign[operator]} {right}"
    nested = priority < parent or (operator == _PHRASE and after_phrase)
    return f"( {text} )" if nested else text


# -- times ---------------------------------------------------------------------------------------


def date_text(data: bytes) -> str:
    """Return the text of a date."""
    return _endless(data) or " ".join(_calendar(int.from_bytes(data, signed=True)))


def timestamp_text(data: bytes, zone: str = "") -> str:
    """Return the text of a timestamp."""
    if endless := _endless(data):
        return endless
    days, time = divmod(int.from_bytes(data, signed=True), _DAY)
    day, *era = _calendar(days)
    return " ".join([day, _clock(time) + zone, *era])


def time_text(data: bytes) -> str:
    """Return the text of a time."""
    time = int.from_bytes(data, signed=True)
    if not 0 <= time <= _DAY:
        raise ValueError(f"{time} µs are not within a day")
    return _clock(time)


def timetz_text(data: bytes) -> str:
    """Return the text of a time with time zone; its offset is in seconds west of UTC."""
    west = int.from_bytes(data[8:], signed=True)
    minutes, seconds = divmod(abs(west), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [hours, minutes, seconds] if seconds else [hours, minutes] if minutes else [hours]
    return time_text(data[:8]) + "+-"[west > 0] + ":".join(f"{part:02d}" for part in parts)


def interval_text(data: bytes) -> str:
    """Return the text of an interval; each unit has its own sign."""
    time, days, months = struct.unpack("!qii", data)
    if (time, days, months) == (2**63 - 1, 2**31 - 1, 2**31 - 1):
        return "infinity"
    if (time, days, months) == (-(2**63), -(2**31), -(2**31)):
        return "-infinity"
    years = int(math.copysign(abs(months) // 12, months))
    units = (years, "year"), (months - 12 * years, "mon"), (days, "day")
    parts: list[str] = []
    for value, unit in units:
        if value:
            parts.append(f"{_plus(value, parts)}{value} {unit}{'' if value == 1 else 's'}")
    if time or not parts:
        parts.append(f"{'-' if time < 0 else _plus(1, parts)}{_clock(abs(time))}")
    return " ".join(parts)


def _plus(value: int, before: list[str]) -> str:
    """Return the plus sign of a positive unit after a negative one."""
    return "+" if value > 0 and before and before[-1].startswith("-") else ""


def _endless(data: bytes) -> str | None:
    """Return infinity or -infinity for the greatest and the smallest number, else None."""
    bits, number = 8 * len(data) - 1, int.from_bytes(data, signed=True)
    return {2**bits - 1: "infinity", -(2**bits): "-infinity"}.get(number)


def _calendar(days: int) -> tuple[str, ...]:
    """Return a date, given as days since 2000-01-01, and "BC" if it is before the year 1."""
    cycles, rest = divmod(days, _CYCLE)
    day = _START + timedelta(days=rest)
    year = day.year + 400 * cycles
    if year > 0:
        return (f"{year:04d}-{day:%m-%d}",)
    return f"{1 - year:04d}-{day:%m-%d}", "BC"


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    text = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text


#: For types that psycopg loads as bytes, or not as PostgreSQL writes them.
BY_OID: dict[int, Callable[[bytes], str]] = {
    18: _char,
    22: _vector,
    27: _tid,
    28: _number,  # xid
    29: _number,  # cid
    30: _vector,
    142: bytes.decode,  # xml
    600: _points,  # point
    601: lambda data: f"[{_points(data)}]",  # lseg
    602: _path,
    603: _points,  # box
    604: lambda data: f"({_counted_points(data, 0)})",  # polygon
    628: _line,
    718: _circle,
    774: _address,  # macaddr8
    790: _money,
    829: _address,  # macaddr
    1560: _bits,  # bit
    1562: _bits,  # varbit
    1790: bytes.decode,  # refcursor
    2970: _snapshot,  # txid_snapshot
    3220: _lsn,
    3614: _tsvector,
    3615: _tsquery,
    4072: versioned_text,  # jsonpath
    5038: _snapshot,  # pg_snapshot
    5069: _number,  # xid8
}
#: Types whose values refer to the catalog (regproc, regclass, …): their bytes hold only the oid.
BY_OID |= dict.fromkeys((24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191), _number)
