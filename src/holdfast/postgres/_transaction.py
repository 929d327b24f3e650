"""Committed transactions, as consumers get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from ._body import Body
from ._changes import Change, Emitted, Insert, Truncate, read_change, xid_of
from ._errors import ProtocolError
from ._pgoutput import ROWS, LogicalMessage, TruncateMessage, parse, time_of
from ._rows import Relation

__all__ = ["HEADER", "Committed"]

#: Every message is kept with the header of the replication protocol before it: cutting it off would
#: be one more copy.
HEADER = 25
#: Where in a message of a row, in a transaction that came whole, the table's oid and the row are.
_OID, _ROW = slice(HEADER + 1, HEADER + 5), HEADER + 5
_INSERT = ord("I")


class Committed:
    """A transaction, and where it lies in the log once it is complete."""

    __slots__ = (
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
        #: The tables as they were when it began.
        self.relations = relations
        #: Whether it came in parts, and the subtransactions that were rolled back.
        self.streamed = streamed
        self.aborted: set[int] | None = None
        #: The server that it came from, if it came by replication.
        self.origin: str | None = None

    def complete(self, commit_lsn: int, end_lsn: int, time: int) -> Committed:
        """It is committed."""
        self.commit_lsn = commit_lsn
        #: Where the log goes on after it.
        self.end_lsn = end_lsn
        #: When it was committed, in microseconds since 2000.
        self.time = time
        return self

    @property
    def commit_time(self) -> datetime:
        """When it was committed, by the server's clock."""
        return time_of(self.time)

    def __len__(self) -> int:
        """How many changes came; those of subtransactions that were rolled back are among them."""
        return self.body.count

    def known(self) -> Mapping[int, Relation]:
        """All tables that it may speak of, as they are at its end."""
        if not self.body.described:
            return self.relations
        return {**self.relations, **{each.oid: each for each in self.body.described}}

    def touched(self) -> set[int]:
        """The tables that it does speak of."""
        return {change.relation.oid for change in self if not isinstance(change, Emitted)}

    def __iter__(self) -> Iterator[Change | Truncate | Emitted]:
        """The changes, in the order in which they were made."""
        return self._parts() if self.streamed else self._whole()

    def _whole(self) -> Iterator[Change | Truncate | Emitted]:
        relations = self.relations
        # Rows of one table come one after the other: it is not looked for each time.
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
            raise ProtocolError(f"{type(message).__name__} is not a change")
        for oid in message.oids:
            if oid not in relations:
                raise ProtocolError(f"a truncated table was not described before (oid {oid})")
            yield Truncate(
                relations[oid],
                cascade=message.cascade,
                restart_identity=message.restart_identity,
            )
