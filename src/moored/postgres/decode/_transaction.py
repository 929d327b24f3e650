"""Committed transactions, and iteration over their changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from .._errors import DecodeError
from ._body import HEADER, TRUNCATE, Body
from ._changes import Change, Emitted, Insert, Truncate, read_change, xid_of
from ._pgoutput import ROWS, LogicalMessage, TruncateMessage, parse, time_of
from ._rows import Relation

__all__ = ["HEADER", "Committed"]

#: Where the table's oid and the row are in the message of a row; in a streamed transaction, the xid
#: of the subtransaction is where otherwise the oid is.
_OID, _ROW = slice(HEADER + 1, HEADER + 5), HEADER + 5
_XID = _OID
_INSERT = ord("I")


class _Counts(NamedTuple):
    """The number of changes of each table, and of pg_logical_emit_message() messages."""

    tables: dict[int, int]
    emitted: int


class Committed:
    """A transaction, with its LSNs once it is complete."""

    __slots__ = (
        "_found",
        "_touched",
        "aborted",
        "body",
        "commit_lsn",
        "end_lsn",
        "origin",
        "relations",
        "streamed",
        "time",
        "xid",
    )

    def __init__(
        self, xid: int, body: Body, relations: Mapping[int, Relation], streamed: bool
    ) -> None:
        self.xid = xid
        self.body = body
        #: The descriptions of tables at its begin.
        self.relations = relations
        #: Whether it was sent in parts, and the subtransactions that were rolled back.
        self.streamed = streamed
        self.aborted: set[int] | None = None
        #: The replication origin, if it was replicated from another server.
        self.origin: str | None = None
        self._found: _Counts | None = None
        self._touched: frozenset[int] | None = None

    def complete(self, commit_lsn: int, end_lsn: int, time: int) -> Committed:
        """Set the LSNs and the time of its commit, and return it."""
        self.commit_lsn = commit_lsn
        #: The LSN after the commit record.
        self.end_lsn = end_lsn
        #: The time of the commit, in microseconds since 2000.
        self.time = time
        return self

    @property
    def commit_time(self) -> datetime:
        """The time of the commit, by the server's clock."""
        return time_of(self.time)

    def __len__(self) -> int:
        """Return the number of changes, including those of rolled back subtransactions."""
        return self.body.count

    def known(self) -> Mapping[int, Relation]:
        """Return the descriptions of tables at its end."""
        if not self.body.described:
            return self.relations
        return {**self.relations, **{each.oid: each for each in self.body.described}}

    def touched(self) -> frozenset[int]:
        """Return the tables that it changes; with very many subtransactions, all known tables."""
        if self._touched is None:
            found = self._counts()
            self._touched = frozenset(self.known() if found is None else found.tables)
        return self._touched

    def emits(self) -> bool:
        """Return whether it has messages of pg_logical_emit_message()."""
        found = self._counts()
        return found.emitted > 0 if found else any(isinstance(each, Emitted) for each in self)

    def count(self, tables: frozenset[int] | None) -> int:
        """Return the number of changes that iteration yields; with `tables`, only of these."""
        if tables is None and not self.aborted:
            return self.body.count
        if (found := self._counts()) is None:
            return sum(1 for each in self if _is_of(each, tables))
        numbers = found.tables.items()
        return found.emitted + sum(n for oid, n in numbers if tables is None or oid in tables)

    def _counts(self) -> _Counts | None:
        """Count its changes without decoding them, once for all consumers; None if too many."""
        if self._found is None and (mentioned := self.body.mentioned()) is not None:
            self._found = self._count_all(mentioned)
        return self._found

    def _count_all(self, mentioned: Mapping[bytes, int]) -> _Counts:
        gone, streamed = {xid.to_bytes(4) for xid in self.aborted or ()}, self.streamed
        tables: dict[int, int] = {}
        emitted, truncates = 0, False
        for key, number in mentioned.items():
            if gone and key[1:5] in gone:
                continue
            if key[0] in ROWS:
                oid = int.from_bytes(key[5:] if streamed else key[1:5])
                tables[oid] = tables.get(oid, 0) + number
            elif key[:1] == TRUNCATE:
                truncates = True
            else:
                emitted += number
        for entry in self.body.truncates() if truncates else ():
            message = parse(entry, HEADER, streamed=streamed)
            if isinstance(message, TruncateMessage) and entry[_XID] not in gone:
                for oid in message.oids:
                    tables[oid] = tables.get(oid, 0) + 1
        return _Counts(tables, emitted)

    def __iter__(self) -> Iterator[Change | Truncate | Emitted]:
        """Yield the changes in the order in which they were made."""
        return self._parts() if self.streamed else self._whole()

    def _whole(self) -> Iterator[Change | Truncate | Emitted]:
        relations = self.relations
        # Successive rows are mostly of the same table: look it up only when the oid changes.
        oid, relation = b"", None
        for entry in self.body.entries():
            if type(entry) is Relation:
                relations = {**relations, entry.oid: entry}
                oid = b""
                continue
            assert type(entry) is bytes
            if entry[HEADER] == _INSERT:
                if entry[_OID] != oid:
                    oid = entry[_OID]
                    relation = relations.get(int.from_bytes(oid))
                if relation is not None and len(oid) == 4:
                    yield Insert(relation, entry, _ROW)
                else:
                    yield read_change(entry, HEADER, relations, streamed=False)
            elif entry[HEADER] in ROWS:
                yield read_change(entry, HEADER, relations, streamed=False)
            else:
                yield from self._others(entry, relations)

    def _parts(self) -> Iterator[Change | Truncate | Emitted]:
        relations, aborted = dict(self.relations), self.aborted
        for entry in self.body.entries():
            if isinstance(entry, Relation):
                relations[entry.oid] = entry
            elif aborted and xid_of(entry, HEADER) in aborted:
                continue
            elif entry[HEADER] in ROWS:
                yield read_change(entry, HEADER, relations, streamed=True)
            else:
                yield from self._others(entry, relations)

    def _others(
        self, entry: bytes, relations: Mapping[int, Relation]
    ) -> Iterator[Truncate | Emitted]:
        message = parse(entry, HEADER, streamed=self.streamed)
        if isinstance(message, LogicalMessage):
            yield Emitted(message.prefix, message.content)
            return
        if not isinstance(message, TruncateMessage):
            raise DecodeError(f"{type(message).__name__} is not a change")
        for oid in message.oids:
            if oid not in relations:
                raise DecodeError(f"a truncated table was not described before (oid {oid})")
            yield Truncate(
                relations[oid],
                cascade=message.cascade,
                restart_identity=message.restart_identity,
            )


def _is_of(change: Change | Truncate | Emitted, tables: frozenset[int] | None) -> bool:
    return tables is None or isinstance(change, Emitted) or change.relation.oid in tables
