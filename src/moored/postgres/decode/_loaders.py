"""The loaders that convert the bytes of values to Python objects.

They are psycopg's, many in C, but for intervals. Values of types for which psycopg has no loader
are strings in text format, and bytes in binary format.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, Buffer, Loader, Transformer

__all__ = ["loader"]

_BINARY, _TEXT = pq.Format.BINARY, pq.Format.TEXT
_INTERVAL = 1186
_INTERVAL_FORM = re.compile(
    rb"(?:([-+]?\d+) years? ?)?(?:([-+]?\d+) mons? ?)?(?:([-+]?\d+) days? ?)?"
    rb"(?:([-+])?(\d+):(\d+):(\d+)(?:\.(\d+))?)?"
)
#: The types with values that Python cannot represent (infinity, the year 12000, 24:00, a number in
#: JSON beyond Python's limit of digits): json, jsonb, and all types of times.
_TOO_LARGE = 114, 3802, 1082, 1083, 1114, 1184, _INTERVAL, 1266
#: Values that are not loaded: of a "char" that may not be UTF-8, and of records, which no column
#: has, and whose loaders do not check their input.
_UNLOADED = (18, _BINARY), (2249, _BINARY), (2249, _TEXT), (2287, _BINARY), (2287, _TEXT)


@cache
def loader(oid: int, form: pq.Format, *, lenient: bool) -> Callable[[bytes], Any]:
    """Return the function that loads the values of a type.

    :param lenient: leave a value that Python cannot represent as it is, instead of raising; slower.
    """
    adapters = _lenient_adapters() if lenient else _adapters()
    return Transformer(adapters).get_loader(oid, form).load


@cache
def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_loader(_INTERVAL, _IntervalLoader)
    adapters.register_loader(_INTERVAL, _IntervalBinaryLoader)
    for oid, form in _UNLOADED:
        unknown = adapters.get_loader(0, form)
        assert unknown is not None
        adapters.register_loader(oid, unknown)
    return adapters


@cache
def _lenient_adapters() -> AdaptersMap:
    adapters = AdaptersMap(_adapters())
    for oid in _TOO_LARGE:
        for form in (_TEXT, _BINARY):
            strict = adapters.get_loader(oid, form)
            assert strict is not None
            adapters.register_loader(oid, _lenient(strict, form))
    return adapters


# psycopg loads an infinite interval as an empty one, and loses digits of a long one.


class _IntervalLoader(Loader):
    def load(self, data: Buffer) -> timedelta:
        found = _INTERVAL_FORM.fullmatch(data)
        if found is None:
            raise psycopg.DataError(f"{bytes(data)!r} is not an interval")
        years, months, days, hours, minutes, seconds = (
            int(found[place] or 0) for place in (1, 2, 3, 5, 6, 7)
        )
        seconds += 3600 * hours + 60 * minutes
        time = 1_000_000 * seconds + int((found[8] or b"").ljust(6, b"0"))
        return _span(12 * years + months, days, -time if found[4] == b"-" else time)


class _IntervalBinaryLoader(Loader):
    format = _BINARY

    def load(self, data: Buffer) -> timedelta:
        time, days, months = struct.unpack("!qii", data)
        return _span(months, days, time)


def _span(months: int, days: int, microseconds: int) -> timedelta:
    """Return a timedelta, with 365 days for a year and 30 for a month, as psycopg does."""
    years, rest = divmod(abs(months), 12)
    whole = 365 * years + 30 * rest
    return timedelta(days=days + (whole if months > 0 else -whole), microseconds=microseconds)


def _lenient(strict: Any, form: pq.Format) -> type[Loader]:
    class Lenient(Loader):
        format = form

        def __init__(self, oid: int, context: Any = None) -> None:
            super().__init__(oid, context)
            self._load = strict(oid, context).load

        def load(self, data: Buffer) -> Any:
            try:
                return self._load(data)
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise
            except (psycopg.DataError, ValueError, OverflowError, RecursionError):
                return _infinity_or_bytes(bytes(data)) if form is _BINARY else bytes(data).decode()

    return Lenient


def _infinity_or_bytes(data: bytes) -> str | bytes:
    """Return infinity or -infinity for the greatest and the smallest date or timestamp."""
    bits, number = 8 * len(data) - 1, int.from_bytes(data, signed=True)
    return {2**bits - 1: "infinity", -(2**bits): "-infinity"}.get(number, data)
