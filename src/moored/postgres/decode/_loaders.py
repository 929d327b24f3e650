"""What turns the bytes of a value into what Python has for it.

Most of it is psycopg's, much of that in C. Types that psycopg leaves as bytes come as their text.
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
#: No column is of these, and their loaders would believe anything.
_NO_COLUMNS = 2249, 2287  # record, record[]


def transformer() -> abc.Transformer:
    """Loads values as psycopg does, and types that it gives as bytes as their text."""
    return Transformer(_adapters())


def lenient_transformer() -> abc.Transformer:
    """Loads values that Python cannot hold, too: as their text. It is slower."""
    return Transformer(_lenient_adapters())


@cache
def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    for oid, text_of in _texts.BY_OID.items():
        # Somebody may have registered a loader that knows better.
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


# psycopg takes an endless interval for an empty one, and loses digits of a long one.


class _IntervalLoader(Loader):
    def load(self, data: Buffer) -> timedelta:
        found = _INTERVAL_FORM.fullmatch(data)
        if found is None:
            raise psycopg.DataError(f"{bytes(data)!r} is no interval")
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
    """A year has 365 days, and a month 30, as psycopg has it."""
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


#: The types with values that Python cannot hold: infinity, the year 12000, 24:00, a number in JSON
#: that is longer than Python reads. And how such a value is written.
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
