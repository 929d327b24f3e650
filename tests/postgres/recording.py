"""Helpers for tests of the decoder: hand-made messages, and streams recorded from a server."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from moored.postgres.decode._assembler import Assembler
from moored.postgres.decode._changes import Change, Emitted, Insert, Truncate
from moored.postgres.decode._transaction import Committed
from moored.postgres.server._setup import DISPLAY

__all__ = [
    "Recorder",
    "Value",
    "begin",
    "binary",
    "commit",
    "delete",
    "feed_all",
    "framed",
    "insert",
    "relation",
    "row",
    "summary",
    "text",
    "texts",
    "update",
]

_numbers = itertools.count(1)

#: A kind of value and its bytes, as a row has it: (b"t", b"12"), or (b"n", None).
Value = tuple[bytes, bytes | None]
NULL: Value = (b"n", None)
TOAST: Value = (b"u", None)


# -- messages made by hand -----------------------------------------------------------------------


def framed(message: bytes, start: int = 0x10, end: int = 0x20, sent: int = 0) -> bytes:
    """A message with the header that the replication protocol puts before it."""
    return struct.pack("!cQQq", b"w", start, end, sent) + message


def text(value: str) -> bytes:
    """A text, as messages have it."""
    return value.encode() + b"\0"


def begin(xid: int = 700, final: int = 0x1000, time: int = 0) -> bytes:
    """A transaction begins."""
    return b"B" + struct.pack("!QqI", final, time, xid)


def commit(lsn: int = 0x1000, end: int = 0x1030, time: int = 0) -> bytes:
    """And is complete."""
    return b"C" + struct.pack("!BQQq", 0, lsn, end, time)


def relation(
    columns: Sequence[tuple[str, int] | tuple[str, int, bool]],
    *,
    oid: int = 16400,
    schema: str = "public",
    name: str = "t",
    identity: bytes = b"d",
) -> bytes:
    """A table, with names and types of its columns, and whether they are part of the key."""
    message = b"R" + struct.pack("!I", oid) + text(schema) + text(name) + identity
    message += struct.pack("!H", len(columns))
    for column, type_oid, *key in columns:
        message += struct.pack("!B", bool(key and key[0])) + text(column)
        message += struct.pack("!Ii", type_oid, -1)
    return message


def binary(value: bytes) -> Value:
    """A binary value."""
    return b"b", value


def texts(*values: str | None) -> list[Value]:
    """Values in text form."""
    return [NULL if value is None else (b"t", value.encode()) for value in values]


def row(values: Sequence[Value]) -> bytes:
    """A row, as messages have it."""
    data = struct.pack("!H", len(values))
    for kind, value in values:
        data += kind if value is None else kind + struct.pack("!I", len(value)) + value
    return data


def insert(values: Sequence[Value], *, oid: int = 16400) -> bytes:
    """A row is new."""
    return b"I" + struct.pack("!I", oid) + b"N" + row(values)


def update(
    values: Sequence[Value],
    *,
    old: tuple[bytes, Sequence[Value]] | None = None,
    oid: int = 16400,
) -> bytes:
    """A row is different; `old` is b"K" or b"O" with the values before."""
    before = old[0] + row(old[1]) if old else b""
    return b"U" + struct.pack("!I", oid) + before + b"N" + row(values)


def delete(values: Sequence[Value], *, kind: bytes = b"K", oid: int = 16400) -> bytes:
    """A row is gone."""
    return b"D" + struct.pack("!I", oid) + kind + row(values)


def feed_all(messages: Sequence[bytes], assembler: Assembler | None = None) -> list[Committed]:
    """The transactions that these messages, without headers, make."""
    assembler = assembler or Assembler()
    fed = (assembler.feed(framed(message)) for message in messages)
    return [committed for committed in fed if committed is not None]


def summary(change: Change | Truncate | Emitted) -> tuple[Any, ...]:
    """A change as a tuple that can be compared and read."""
    match change:
        case Emitted(prefix, content):
            return "message", prefix, content
        case Truncate(table):
            return "truncate", table
        case Change():
            return change.kind, change.table, change.old, change.new
    raise AssertionError(change)


# -- streams of a real server --------------------------------------------------------------------


class Recorder:
    """A database whose changes are published, and slots to read them from as often as wanted."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.publication = "recorded"
        self._slots: list[str] = []
        self.connection = psycopg.connect(url, autocommit=True)
        for setting in DISPLAY:
            self.connection.execute(setting.encode())
        self.run("create publication recorded for all tables")

    @classmethod
    @contextmanager
    def on(cls, url: str) -> Iterator[Self]:
        """Yield a recorder for this database, and drop its slots at the end."""
        recorder = cls(url)
        try:
            yield recorder
        finally:
            recorder.close()

    def run(self, *statements: LiteralString) -> None:
        """Run statements, each by itself."""
        for statement in statements:
            self.connection.execute(statement)

    def transaction(self, *statements: LiteralString) -> None:
        """Run statements as one transaction."""
        with self.connection.transaction():
            self.run(*statements)

    def rows(self, query: LiteralString) -> list[tuple[Any, ...]]:
        """What a query gives."""
        return self.connection.execute(query).fetchall()

    def slot(self) -> str:
        """A new slot; changes from now on can be read from it."""
        name = f"recorded_{os.getpid()}_{next(_numbers)}"
        self.connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        self._slots.append(name)
        return name

    def peek(self, slot: str, **options: str) -> list[bytes]:
        """The messages in a slot, as `START_REPLICATION` with these options would send them."""
        given = {"proto_version": "1", "publication_names": self.publication} | options
        pairs = [part for pair in given.items() for part in pair]
        query = sql.SQL(
            "select data from pg_logical_slot_peek_binary_changes({}, null, null, variadic {})"
        ).format(slot, pairs)
        with self.connection.cursor(binary=True) as cursor:
            return [bytes(data) for (data,) in cursor.execute(query)]

    def transactions(self, slot: str, **options: str) -> list[Committed]:
        """The transactions in a slot."""
        return feed_all(self.peek(slot, **options))

    def changes(self, slot: str, **options: str) -> list[tuple[Any, ...]]:
        """The changes in a slot, one after the other."""
        found = self.transactions(slot, **options)
        return [summary(change) for committed in found for change in committed]

    def inserted(self, slot: str, **options: str) -> list[dict[str, Any]]:
        """The new rows in a slot."""
        found = self.transactions(slot, **options)
        return [
            change.new
            for committed in found
            for change in committed
            if isinstance(change, Insert) and change.new is not None
        ]

    def drop(self, slot: str) -> None:
        """Drop a slot."""
        self._slots.remove(slot)
        self.connection.execute("select pg_drop_replication_slot(%s)", [slot])

    def close(self) -> None:
        """Drop all slots, and close the connection."""
        for slot in list(self._slots):
            self.drop(slot)
        self.connection.close()
