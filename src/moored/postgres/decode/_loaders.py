"""The loaders that convert the bytes of values to Python objects.

Most of them are psycopg's, many in C. Values of types that psycopg leaves as bytes become the
string that PostgreSQL would write.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import psycopg
from psycopg import abc, pq
from psycopg.adapt import AdaptersMap, Buffer, Loader, Transformer

from . import _texts

__all__ = ["lenient_transformer", "transformer"]

_BINARY, _TEXT = pq.Format.BINARY, pq.Format.TEXT
_INTERVAL = 1186
_INTERVAL_FORM = re.compile(
    rb"(?:([-+]?\d+) years? ?)?(?:([-+]?\d+) mons? ?)?(?:([-+]?\d+) days? ?)?"
    rb"(?:([-+])?(\d+):(\d+):(\d+)(?:\.(\d+))?)?"
)
#: No column has these types, and their loaders do not check their input.
_NO_COLUMNS = 2249, 2287  # record, record[]


def transformer() -> abc.Transformer:
    """Return psycopg's loaders, with strings for types that psycopg leaves as bytes."""
    return Transformer(_adapters())


def lenient_transformer() -> abc.Transformer:
    """Return loaders that convert values which Python cannot represent to strings; slower."""
    return Transformer(_lenient_adapters())


@cache
def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    for oid, text_of in _texts.BY_OID.items():
        # Keep a loader that the user has registered.
        if oid == 18 or adapters.get_loader(oid, _BINARY) is None:
            adapters.register_loader(oid, _writes(text_of))
    adapters.register_loader(_INTERVAL, _IntervalLoader)
    adapters.register_loader(_INTERVAL, _IntervalBinaryLoader)
    for oid in _NO_COLUMNS:
        for form in (_BINARY, _TEXT):
            unknown = adapters.get_loader(0, form)
            assert unknown is not None
            adapters.register_loader(oid, unknown)
    return adapters


@cache
def _lenient_adapters() -> AdaptersMap:
    adapters = AdaptersMap(_adapters())
    for oid, text_of in _TOO_LARGE.items():
        for form, to_text in ((_TEXT, bytes.decode), (_BINARY, text_of)):
            loader = adapters.get_loader(oid, form)
            assert loader is not None
            adapters.register_loader(oid, _lenient(loader, form, to_text))
    return adapters


def _writes(text_of: Callable[[bytes], str]) -> type[Loader]:
    class Written(Loader):
        format = _BINARY

        def load(self, data: Buffer) -> str:
            return text_of(bytes(data))

    return Written


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


def _lenient(strict: Any, form: pq.Format, text_of: Callable[[bytes], str]) -> type[Loader]:
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
                return text_of(bytes(data))

    return Lenient


#: The types with values that Python cannot represent (infinity, the year 12000, 24:00, a number in
#: JSON beyond Python's limit of digits), with the function that writes their text.
_TOO_LARGE: dict[int, Callable[[bytes], str]] = {
    114: bytes.decode,  # json
    3802: _texts.versioned_text,  # jsonb
    1082: _texts.date_text,
    1083: _texts.time_text,
    1114: _texts.timestamp_text,
    1184: partial(_texts.timestamp_text, zone="+00"),
    _INTERVAL: _texts.interval_text,
    1266: _texts.timetz_text,
}
