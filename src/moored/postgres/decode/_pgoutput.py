"""The messages of pgoutput, PostgreSQL's logical replication protocol, versions 1 to 4.

Messages of rows (insert, update, delete) are not parsed here: a `Change` decodes its message when
its rows are first read. A message that violates the protocol is a `DecodeError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from .._errors import DecodeError
from .._lsn import Lsn
from ._rows import Column, Relation, ReplicaIdentity

__all__ = [
    "ROWS",
    "Begin",
    "BeginPrepare",
    "Commit",
    "CommitPrepared",
    "LogicalMessage",
    "Message",
    "Origin",
    "Prepare",
    "RollbackPrepared",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "TruncateMessage",
    "TypeName",
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


class Begin(NamedTuple):
    """A transaction begins; all messages up to its commit belong to it."""

    #: The LSN of its commit.
    final_lsn: int
    #: The time of its commit, in microseconds since 2000.
    time: int
    xid: int


class Commit(NamedTuple):
    """The transaction is complete."""

    commit_lsn: int
    #: The LSN after the commit record.
    end_lsn: int
    time: int


class Origin(NamedTuple):
    """The transaction was replicated from another server."""

    commit_lsn: Lsn
    name: str


class TypeName(NamedTuple):
    """The name of a type that is not built in."""

    xid: int | None
    oid: int
    schema: str
    name: str


class TruncateMessage(NamedTuple):
    """Tables were truncated."""

    xid: int | None
    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


class LogicalMessage(NamedTuple):
    """A message of pg_logical_emit_message()."""

    xid: int | None
    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


class StreamStart(NamedTuple):
    """A part of a transaction that is still in progress follows."""

    xid: int
    first: bool


class StreamStop(NamedTuple):
    """The part ends."""


class StreamCommit(NamedTuple):
    """A transaction that was sent in parts is committed."""

    xid: int
    commit_lsn: int
    end_lsn: int
    time: int


class StreamAbort(NamedTuple):
    """A transaction that was sent in parts, or a subtransaction of it, was rolled back."""

    xid: int
    subxid: int
    abort_lsn: Lsn | None = None
    abort_time: datetime | None = None


class BeginPrepare(NamedTuple):
    """A transaction begins that ends with PREPARE TRANSACTION."""

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: datetime
    xid: int
    gid: str


class Prepare(BeginPrepare):
    """The transaction is prepared."""

    __slots__ = ()


class StreamPrepare(BeginPrepare):
    """A transaction that was sent in parts is prepared."""

    __slots__ = ()


class CommitPrepared(NamedTuple):
    """A prepared transaction is committed."""

    commit_lsn: int
    end_lsn: int
    time: int
    xid: int
    gid: str


class RollbackPrepared(NamedTuple):
    """A prepared transaction is rolled back."""

    prepare_end_lsn: Lsn
    rollback_end_lsn: Lsn
    prepare_time: datetime
    rollback_time: datetime
    xid: int
    gid: str


#: A table, or one of the named tuples above.
Message = Relation | tuple[Any, ...]


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


def parse(data: bytes, at: int, *, streamed: bool) -> Message:
    """Parse the message whose first byte is here; not for those of `ROWS`.

    :param streamed: whether it is within a part of a transaction in progress: then most messages
        contain the xid of their transaction.
    """
    try:
        read = _READERS[data[at]]
    except (KeyError, IndexError):
        if at >= len(data):
            raise DecodeError("a message of pgoutput is empty") from None
        raise DecodeError(f"no message of pgoutput begins with {data[at]:#04x}") from None
    reader = _Reader(data, at + 1)
    message = read(reader, streamed)
    reader.done()
    return message


def _origin(reader: _Reader, streamed: bool) -> Origin:
    (lsn,) = reader.numbers("Q")
    return Origin(Lsn(lsn), reader.text())


def _xid(reader: _Reader, streamed: bool) -> int | None:
    return reader.numbers("I")[0] if streamed else None


def _relation(reader: _Reader, streamed: bool) -> Relation:
    _xid(reader, streamed)
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


def _type(reader: _Reader, streamed: bool) -> TypeName:
    xid = _xid(reader, streamed)
    (oid,) = reader.numbers("I")
    return TypeName(xid, oid, reader.text() or "pg_catalog", reader.text())


def _truncate(reader: _Reader, streamed: bool) -> TruncateMessage:
    xid = _xid(reader, streamed)
    count, options = reader.numbers("IB")
    if count * 4 > reader.left:
        raise DecodeError("a message is truncated")
    oids = reader.numbers(f"{count}I")
    return TruncateMessage(xid, oids, bool(options & 1), bool(options & 2))


def _logical(reader: _Reader, streamed: bool) -> LogicalMessage:
    xid = _xid(reader, streamed)
    flags, lsn = reader.numbers("BQ")
    prefix = reader.text()
    (size,) = reader.numbers("I")
    return LogicalMessage(xid, bool(flags & 1), Lsn(lsn), prefix, reader.rest(size))


def _stream_start(reader: _Reader, streamed: bool) -> StreamStart:
    xid, first = reader.numbers("IB")
    return StreamStart(xid, bool(first))


def _stream_commit(reader: _Reader, streamed: bool) -> StreamCommit:
    xid, _, lsn, end, time = reader.numbers("IBQQq")
    return StreamCommit(xid, lsn, end, time)


def _stream_abort(reader: _Reader, streamed: bool) -> StreamAbort:
    xid, subxid = reader.numbers("II")
    if not reader.left:
        return StreamAbort(xid, subxid)
    lsn, time = reader.numbers("Qq")
    return StreamAbort(xid, subxid, Lsn(lsn), time_of(time))


def _begin_prepare(reader: _Reader, streamed: bool) -> BeginPrepare:
    lsn, end, time, xid = reader.numbers("QQqI")
    return BeginPrepare(Lsn(lsn), Lsn(end), time_of(time), xid, reader.text())


def _prepared(reader: _Reader) -> tuple[Lsn, Lsn, datetime, int, str]:
    _, lsn, end, time, xid = reader.numbers("BQQqI")
    return Lsn(lsn), Lsn(end), time_of(time), xid, reader.text()


def _commit_prepared(reader: _Reader, streamed: bool) -> CommitPrepared:
    _, lsn, end, time, xid = reader.numbers("BQQqI")
    return CommitPrepared(lsn, end, time, xid, reader.text())


def _rollback_prepared(reader: _Reader, streamed: bool) -> RollbackPrepared:
    _, end, rolled_back, prepared, time, xid = reader.numbers("BQQqqI")
    times = time_of(prepared), time_of(time)
    return RollbackPrepared(Lsn(end), Lsn(rolled_back), *times, xid, reader.text())


_READERS: dict[int, Callable[[_Reader, bool], Message]] = {
    ord("B"): lambda reader, _: Begin(*reader.numbers("QqI")),
    ord("C"): lambda reader, _: Commit(*reader.numbers("BQQq")[1:]),
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("T"): _truncate,
    ord("M"): _logical,
    ord("S"): _stream_start,
    ord("E"): lambda *_: StreamStop(),
    ord("c"): _stream_commit,
    ord("A"): _stream_abort,
    ord("b"): _begin_prepare,
    ord("P"): lambda reader, _: Prepare(*_prepared(reader)),
    ord("K"): _commit_prepared,
    ord("r"): _rollback_prepared,
    ord("p"): lambda reader, _: StreamPrepare(*_prepared(reader)),
}
