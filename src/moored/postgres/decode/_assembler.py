"""Assemble messages into committed transactions, in commit order.

Transactions arrive complete, one after the other, or (from protocol version 2 on, if they are
large) in parts while they are in progress, interleaved with others; those that are rolled back are
discarded. Prepared transactions are kept until their second phase.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import islice

from .._errors import DecodeError
from .._lsn import Lsn
from ._body import Body
from ._pgoutput import (
    ROWS,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    TruncateMessage,
    TypeName,
    parse,
)
from ._rows import Relation
from ._transaction import HEADER, Committed
from ._wire import KEEPALIVE

__all__ = ["Assembler"]

_BEGIN, _COMMIT = b"BC"
_BEGIN_SIZE, _COMMIT_SIZE = HEADER + 21, HEADER + 26
_begin = struct.Struct("!QqI").unpack_from
_places = struct.Struct("!QQq").unpack_from
_sent_at = struct.Struct("!q").unpack_from
#: The commit LSN of a transaction that ends with PREPARE is not known at its begin.
_NOT_YET = -1


class Assembler:
    """Assembles transactions; `feed` returns one when it is complete.

    :param new_body: creates the store for the messages of a transaction.
    """

    def __init__(self, new_body: Callable[[], Body] = Body) -> None:
        self._new_body = new_body
        # Replaced, never changed in place: transactions refer to it.
        self._relations: dict[int, Relation] = {}
        self._now: Committed | None = None
        self._streams: dict[int, Committed] = {}
        self._prepared: dict[str, Committed] = {}
        #: The names of types that are not built in, by oid.
        self.type_names: dict[int, str] = {}

    @property
    def inside(self) -> bool:
        """Whether a transaction, or a part of one, is being received."""
        return self._now is not None

    @property
    def pending(self) -> int:
        """The bytes of incomplete transactions."""
        now = [self._now] if self._now is not None and not self._now.streamed else []
        parts = [*self._streams.values(), *self._prepared.values(), *now]
        return sum(part.body.size for part in parts)

    def feed_all(self, messages: list[bytes], begin: int = 0) -> tuple[list[Committed], int]:
        """Take all messages from this index on, up to a keepalive.

        Returns the completed transactions, and the index of the keepalive or the end. An invalid
        message is raised when it is the first one; after completed transactions, it ends the call
        early, so that these are not lost.
        """
        done: list[Committed] = []
        rows, feed = ROWS, self.feed
        first = begin  # of the rows that were not stored yet
        place = begin - 1
        for data in islice(messages, begin, None):
            place += 1
            # A keepalive is shorter than the header.
            if len(data) > HEADER and data[HEADER] in rows:
                continue
            try:
                if first < place:
                    self._keep_rows(messages[first:place])
                    first = place
                if data[0] == KEEPALIVE:
                    return done, place
                committed = feed(data)
            except DecodeError:
                if done:
                    return done, first
                raise
            first = place + 1
            if committed is not None:
                done.append(committed)
        place += 1
        if first < place:
            if self._now is None and done:
                return done, first
            self._keep_rows(messages[first:place])
        return done, place

    def _keep_rows(self, messages: list[bytes]) -> None:
        if self._now is None:
            raise DecodeError("a change of a row outside of a transaction")
        self._now.body.extend(messages)

    def feed(self, data: bytes) -> Committed | None:
        """Take one message, with its XLogData header; return a transaction that it completes."""
        try:
            kind = data[HEADER]
        except IndexError:
            raise DecodeError("a message of the stream is empty") from None
        now = self._now
        # Fast path: every transaction has a begin and a commit.
        if kind == _BEGIN:
            if len(data) == _BEGIN_SIZE and now is None:
                lsn, _, xid = _begin(data, HEADER + 1)
                self._now = now = Committed(xid, self._new_body(), self._relations, False)
                now.commit_lsn = lsn
                return None
        elif kind == _COMMIT:
            if len(data) == _COMMIT_SIZE and now is not None and not now.streamed:
                lsn, now.end_lsn, now.time = _places(data, HEADER + 2)
                if lsn != now.commit_lsn or now.end_lsn < lsn:
                    raise _misplaced(now, lsn, now.end_lsn)
                self._now = None
                return now
        elif kind in ROWS:
            if now is None:
                raise DecodeError("a change of a row outside of a transaction")
            now.body.append(data)
            return None
        streamed = now is not None and now.streamed
        message = parse(data, HEADER, streamed=streamed)
        return _HANDLERS[type(message)](self, message, data)

    # -- whole transactions --------------------------------------------------------------------

    def _begin(self, message: Begin | BeginPrepare, data: bytes) -> None:
        if self._now is not None:
            raise DecodeError(f"a transaction begins within transaction {self._now.xid}")
        self._now = Committed(message.xid, self._new_body(), self._relations, False)
        self._now.commit_lsn = _NOT_YET

    def _commit(self, message: Commit, data: bytes) -> Committed:
        # A valid commit was handled by the fast path.
        where = "outside of a transaction" if self._now is None else "within a part of one"
        raise DecodeError(f"a commit {where}")

    def _origin(self, message: Origin, data: bytes) -> None:
        self._current("an origin").origin = message.name

    def _relation(self, relation: Relation, data: bytes) -> None:
        self._relations = {**self._relations, relation.oid: relation}
        if self._now is not None:
            self._now.body.describe(relation)

    def _type(self, message: TypeName, data: bytes) -> None:
        self.type_names[message.oid] = f"{message.schema}.{message.name}"

    def _keep(self, message: TruncateMessage | LogicalMessage, data: bytes) -> Committed | None:
        if self._now is not None and getattr(message, "transactional", True):
            self._now.body.append(data)
            if isinstance(message, TruncateMessage):  # one change for each table
                self._now.body.count += len(message.oids) - 1
            return None
        if not isinstance(message, LogicalMessage):
            raise DecodeError("a truncate outside of a transaction")
        return self._alone(message, data)

    def _alone(self, message: LogicalMessage, data: bytes) -> Committed:
        """Return a message outside of any transaction as a transaction of its own."""
        body = self._new_body()
        body.append(data)
        streamed = self._now is not None and self._now.streamed
        parts = Committed(0, body, self._relations, streamed)
        # The time of the message is not sent: use the time at which the server has sent it.
        return parts.complete(message.lsn, message.lsn, *_sent_at(data, HEADER - 8))

    # -- in parts ------------------------------------------------------------------------------

    def _stream_start(self, message: StreamStart, data: bytes) -> None:
        if self._now is not None:
            raise DecodeError(f"a part of a transaction begins within {self._now.xid}")
        if message.first is (message.xid in self._streams):
            problem = "came before" if message.first else "is missing"
            raise DecodeError(f"the first part of transaction {message.xid} {problem}")
        if message.first:
            body = self._new_body()
            self._streams[message.xid] = Committed(message.xid, body, self._relations, True)
        self._now = self._streams[message.xid]

    def _stream_stop(self, message: StreamStop, data: bytes) -> None:
        if not self._current("the end of a part").streamed:
            raise DecodeError("the end of a part within a whole transaction")
        self._now = None

    def _stream_commit(self, message: StreamCommit, data: bytes) -> Committed:
        parts = self._stream(message.xid)
        return parts.complete(message.commit_lsn, message.end_lsn, message.time)

    def _stream_abort(self, message: StreamAbort, data: bytes) -> None:
        self._outside(f"a rollback in transaction {message.xid}")
        # The server also reports rollbacks of transactions of which it has sent nothing.
        if message.xid == message.subxid:
            self._streams.pop(message.xid, None)
        elif (parts := self._streams.get(message.xid)) is not None:
            if parts.aborted is None:
                parts.aborted = set()
            parts.aborted.add(message.subxid)

    def _stream(self, xid: int) -> Committed:
        self._outside(f"the end of transaction {xid}")
        try:
            return self._streams.pop(xid)
        except KeyError:
            raise DecodeError(f"the end of the unknown transaction {xid}") from None

    # -- in two phases -------------------------------------------------------------------------

    def _prepare(self, message: Prepare | StreamPrepare, data: bytes) -> None:
        if isinstance(message, StreamPrepare):
            parts = self._stream(message.xid)
        else:
            parts = self._current("a prepare")
            if parts.streamed or parts.commit_lsn != _NOT_YET or parts.xid != message.xid:
                raise DecodeError(f"a prepare of {message.xid} within transaction {parts.xid}")
            self._now = None
        if message.gid in self._prepared:
            raise DecodeError(f"the transaction {message.gid!r} is prepared twice")
        self._prepared[message.gid] = parts

    def _commit_prepared(self, message: CommitPrepared, data: bytes) -> Committed:
        parts = self._second_phase(message.gid)
        return parts.complete(message.commit_lsn, message.end_lsn, message.time)

    def _rollback_prepared(self, message: RollbackPrepared, data: bytes) -> None:
        self._second_phase(message.gid)

    def _second_phase(self, gid: str) -> Committed:
        self._outside(f"the second phase of {gid!r}")
        try:
            return self._prepared.pop(gid)
        except KeyError:
            raise DecodeError(f"the end of the unknown prepared transaction {gid!r}") from None

    def _current(self, what: str) -> Committed:
        if self._now is None:
            raise DecodeError(f"{what} outside of a transaction")
        return self._now

    def _outside(self, what: str) -> None:
        if self._now is not None:
            raise DecodeError(f"{what} within transaction {self._now.xid}")


def _misplaced(parts: Committed, lsn: int, end: int) -> DecodeError:
    said = f"{Lsn(lsn)} to {Lsn(end)}"
    if parts.commit_lsn == _NOT_YET:
        return DecodeError(f"transaction {parts.xid} is committed ({said}), not prepared")
    wanted = Lsn(parts.commit_lsn)
    return DecodeError(f"transaction {parts.xid} is committed at {said} instead of {wanted}")


_HANDLERS: dict[type, Callable[..., Committed | None]] = {
    Begin: Assembler._begin,
    BeginPrepare: Assembler._begin,
    Commit: Assembler._commit,
    Origin: Assembler._origin,
    Relation: Assembler._relation,
    TypeName: Assembler._type,
    TruncateMessage: Assembler._keep,
    LogicalMessage: Assembler._keep,
    StreamStart: Assembler._stream_start,
    StreamStop: Assembler._stream_stop,
    StreamCommit: Assembler._stream_commit,
    StreamAbort: Assembler._stream_abort,
    Prepare: Assembler._prepare,
    StreamPrepare: Assembler._prepare,
    CommitPrepared: Assembler._commit_prepared,
    RollbackPrepared: Assembler._rollback_prepared,
}
