"""The messages of pgoutput, PostgreSQL's logical replication protocol, version 1.

Messages of rows (insert, update, delete) are not parsed here: a `Change` decodes its message when
its rows are first read. Neither are begin and commit: the `Assembler` reads them. A message that
violates the protocol is a `DecodeError`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from .._errors import DecodeError
from .._lsn import Lsn
from ._rows import Column, Relation, ReplicaIdentity

__all__ = [
    "ROWS",
    "LogicalMessage",
    "Message",
    "Origin",
    "TruncateMessage",
    "parse",
    "time_of",
]

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

#: The first bytes of messages with rows, which are kept as bytes until the rows are read.
ROWS = frozenset(b"IUD")


def time_of(microseconds: int) -> datetime:
    """Return a timestamp of PostgreSQL, in microseconds since 2000, as a datetime."""
    try:
        return _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        raise DecodeError(f"{microseconds} µs since 2000 is not a valid timestamp") from None


class Origin(NamedTuple):
    """The transaction was replicated from another server."""

    name: str


class TruncateMessage(NamedTuple):
    """Tables were truncated."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


#: The prefix of a message by which a publisher wakes the readers of its outbox: its schema, which
#: needs no quotes. Anyone may send other ones.
WAKES = re.compile("[a-z_][a-z0-9_]{0,39}_outbox")


class LogicalMessage(NamedTuple):
    """A message of pg_logical_emit_message()."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes

    @property
    def wakes(self) -> bool:
        """Whether it wakes the readers of an outbox, and says nothing else."""
        return self.transactional and not self.content and WAKES.fullmatch(self.prefix) is not None


#: None for the name of a type, which is not used.
Message = Relation | Origin | TruncateMessage | LogicalMessage | None


class _Reader:
    """Reads one message from front to back; missing or extra bytes are an error."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def numbers(self, form: str) -> tuple[int, ...]:
        layout = "!" + form
        try:
            found = struct.unpack_from(layout, self._data, self._at)
        except struct.error:
            raise DecodeError("a message is truncated") from None
        self._at += struct.calcsize(layout)
        return found

    def text(self) -> str:
        end = self._data.find(0, self._at)
        if end < 0:
            raise DecodeError("a string in a message is not terminated")
        found = self._data[self._at : end]
        self._at = end + 1
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"a string in a message is not UTF-8: {error}") from None

    def rest(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise DecodeError("a message is truncated")
        self._at += size
        return found

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def done(self) -> None:
        if self.left:
            raise DecodeError(f"a message has {self.left} extra bytes")


def parse(data: bytes, at: int) -> Message:
    """Parse the message whose first byte is here; not for begin, commit, and those of `ROWS`."""
    try:
        read = _READERS[data[at]]
    except (KeyError, IndexError):
        if at >= len(data):
            raise DecodeError("a message of pgoutput is empty") from None
        raise DecodeError(f"no message of pgoutput begins with {data[at]:#04x}") from None
    reader = _Reader(data, at + 1)
    message = read(reader)
    reader.done()
    return message


def _origin(reader: _Reader) -> Origin:
    reader.numbers("Q")
    return Origin(reader.text())


def _relation(reader: _Reader) -> Relation:
    (oid,) = reader.numbers("I")
    schema, name = reader.text(), reader.text()
    identity, count = reader.numbers("BH")
    try:
        known = ReplicaIdentity(chr(identity))
    except ValueError:
        raise DecodeError(
            f"the table {name} has the unknown replica identity {identity:#04x}"
        ) from None
    columns = [_column(reader) for _ in range(count)]
    if len({column.name for column in columns}) < count:
        raise DecodeError(f"the table {name} has two columns of the same name")
    return Relation(oid, schema or "pg_catalog", name, known, columns)


def _column(reader: _Reader) -> Column:
    (flags,) = reader.numbers("B")
    name = reader.text()
    oid, modifier = reader.numbers("Ii")
    return Column(name, oid, modifier, bool(flags & 1))


def _type(reader: _Reader) -> None:
    reader.numbers("I")
    reader.text()
    reader.text()


def _truncate(reader: _Reader) -> TruncateMessage:
    count, options = reader.numbers("IB")
    if count * 4 > reader.left:
        raise DecodeError("a message is truncated")
    oids = reader.numbers(f"{count}I")
    return TruncateMessage(oids, bool(options & 1), bool(options & 2))


def _logical(reader: _Reader) -> LogicalMessage:
    flags, lsn = reader.numbers("BQ")
    prefix = reader.text()
    (size,) = reader.numbers("I")
    return LogicalMessage(bool(flags & 1), Lsn(lsn), prefix, reader.rest(size))


_READERS: dict[int, Callable[[_Reader], Message]] = {
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("T"): _truncate,
    ord("M"): _logical,
}
