"""Assemble messages into committed transactions, in commit order."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import islice

from .._errors import DecodeError
from .._lsn import Lsn
from ._body import Body
from ._pgoutput import ROWS, LogicalMessage, Origin, TruncateMessage, parse
from ._rows import Relation
from ._transaction import HEADER, Committed
from ._types import BUILT_IN, Types
from ._wire import KEEPALIVE

__all__ = ["SCHEMA_SIGNAL", "Assembler"]

#: The prefix of the messages by which an event trigger reports changes of the schema.
SCHEMA_SIGNAL = "moored.schema"

_BEGIN, _COMMIT = b"BC"
_BEGIN_SIZE, _COMMIT_SIZE = HEADER + 21, HEADER + 26
_begin = struct.Struct("!QqI").unpack_from
_places = struct.Struct("!QQq").unpack_from
_sent_at = struct.Struct("!q").unpack_from


class Assembler:
    """Assembles transactions; `feed` returns one when it is complete.

    :param new_body: creates the store for the messages of a transaction.
    :param types: the types of the database; the `unknown_types` must be added before a row is read.
    :param messages: keep the messages of pg_logical_emit_message(), except `SCHEMA_SIGNAL`. Without
        it, they only wake the readers of outboxes.
    """

    def __init__(
        self,
        new_body: Callable[[], Body] = Body,
        types: Types = BUILT_IN,
        *,
        messages: bool = True,
    ) -> None:
        self._new_body = new_body
        #: Whether a message has reported a change of the schema; to be cleared by the caller.
        self.schema_changed = False
        self._types = types
        self._messages = messages
        #: The types of tables that `types` did not know when the tables were described.
        self.unknown_types: set[int] = set()
        # Replaced, never changed in place: transactions refer to it.
        self._relations: dict[int, Relation] = {}
        self._now: Committed | None = None

    @property
    def inside(self) -> bool:
        """Whether a transaction is being received."""
        return self._now is not None

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
        if kind == _BEGIN:
            if len(data) != _BEGIN_SIZE:
                raise DecodeError(f"a begin has {len(data)} bytes instead of {_BEGIN_SIZE}")
            if now is not None:
                raise DecodeError(f"a transaction begins within transaction {now.xid}")
            lsn, _, xid = _begin(data, HEADER + 1)
            self._now = Committed(xid, self._new_body(), self._relations, lsn)
            return None
        if kind == _COMMIT:
            if len(data) != _COMMIT_SIZE:
                raise DecodeError(f"a commit has {len(data)} bytes instead of {_COMMIT_SIZE}")
            if now is None:
                raise DecodeError("a commit outside of a transaction")
            lsn, now.end_lsn, now.time = _places(data, HEADER + 2)
            if lsn != now.commit_lsn or now.end_lsn < lsn:
                raise DecodeError(
                    f"transaction {now.xid} is committed at {Lsn(lsn)} to {Lsn(now.end_lsn)} "
                    f"instead of {Lsn(now.commit_lsn)}"
                )
            self._now = None
            return now
        if kind in ROWS:
            self._keep_rows([data])
            return None
        return self._feed_other(data)

    def _feed_other(self, data: bytes) -> Committed | None:
        message = parse(data, HEADER)
        if isinstance(message, Relation):
            message.types = self._types
            used = (column.type_oid for column in message.columns)
            self.unknown_types |= self._types.unknown(used)
            self._relations = {**self._relations, message.oid: message}
            if self._now is not None:
                self._now.body.describe(message)
        elif isinstance(message, LogicalMessage):
            return self._feed_message(message, data)
        elif isinstance(message, Origin):
            self._current("an origin").origin = message.name
        elif message is not None:
            body = self._current("a truncate").body
            body.append(data)
            if isinstance(message, TruncateMessage):  # one change for each table
                body.count += len(message.oids) - 1
        return None

    def _feed_message(self, message: LogicalMessage, data: bytes) -> Committed | None:
        now = self._now
        if now is not None and message.wakes:
            now.wakes |= {message.prefix}
        signal = message.prefix == SCHEMA_SIGNAL
        self.schema_changed |= signal
        if signal or not self._messages:
            if now is not None:
                now.left_out = True
            return None
        if now is None or not message.transactional:
            return self._alone(message, data)
        now.body.append(data)
        return None

    def _current(self, what: str) -> Committed:
        if self._now is None:
            raise DecodeError(f"{what} outside of a transaction")
        return self._now

    def _alone(self, message: LogicalMessage, data: bytes) -> Committed:
        """Return a message outside of any transaction as a transaction of its own."""
        body = self._new_body()
        body.append(data)
        # The time of the message is not sent: use the time at which the server has sent it.
        (sent_at,) = _sent_at(data, HEADER - 8)
        return Committed(0, body, self._relations, message.lsn, message.lsn, sent_at)
