"""The loaders of built-in types: psycopg's, but for intervals and for values that Python lacks."""

from __future__ import annotations

import json
import re
import struct
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, Buffer, Loader

__all__ = ["lenient_adapters", "strict_adapters"]

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


def strict_adapters() -> AdaptersMap:
    """Return psycopg's adapters; they raise for values that Python cannot represent."""
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_loader(_INTERVAL, _IntervalLoader)
    adapters.register_loader(_INTERVAL, _IntervalBinaryLoader)
    for oid, form in _UNLOADED:
        unknown = adapters.get_loader(0, form)
        assert unknown is not None
        adapters.register_loader(oid, unknown)
    return adapters


def lenient_adapters(strict: AdaptersMap) -> AdaptersMap:
    """Return adapters that leave such values as they are."""
    adapters = AdaptersMap(strict)
    for oid in _TOO_LARGE:
        for form in (_TEXT, _BINARY):
            loader = adapters.get_loader(oid, form)
            assert loader is not None
            adapters.register_loader(oid, _lenient(loader, form))
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
