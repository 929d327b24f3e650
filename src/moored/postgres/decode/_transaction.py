"""Committed transactions, and iteration over their changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from .._errors import DecodeError
from ._body import HEADER, TRUNCATE, Body
from ._changes import KINDS, Change, Emitted, Truncate, read_change
from ._pgoutput import ROWS, LogicalMessage, TruncateMessage, parse, time_of
from ._rows import Relation

__all__ = ["HEADER", "Committed"]

#: Where the table's oid and the row are in the message of a row.
_OID, _ROW = slice(HEADER + 1, HEADER + 5), HEADER + 5
_MESSAGE = ord("M")


class _Counts(NamedTuple):
    """The number of changes of each table, and of pg_logical_emit_message() messages."""

    tables: dict[int, int]
    emitted: int


@dataclass(slots=True, eq=False, repr=False)
class Committed:
    """A transaction, with its end and its time once it is complete."""

    xid: int
    body: Body
    #: The descriptions of tables at its begin.
    relations: Mapping[int, Relation]
    commit_lsn: int
    #: The LSN after the commit record.
    end_lsn: int = 0
    #: The time of the commit, in microseconds since 2000.
    time: int = 0
    #: The replication origin, if it was replicated from another server.
    origin: str | None = None
    #: The channels of outboxes to which it has published.
    wakes: frozenset[str] = frozenset()
    #: Whether it had messages that were not kept.
    left_out: bool = False
    _found: _Counts | None = None

    @property
    def commit_time(self) -> datetime:
        """The time of the commit, by the server's clock."""
        return time_of(self.time)

    @property
    def only_messages(self) -> bool:
        """Whether it has nothing for consumers, because its messages were not kept."""
        return self.left_out and not self.body.count

    def known(self) -> Mapping[int, Relation]:
        """Return the descriptions of tables at its end."""
        if not self.body.described:
            return self.relations
        return {**self.relations, **{each.oid: each for each in self.body.described}}

    def touched(self) -> Collection[int]:
        """Return the tables that it changes."""
        return self._counts().tables.keys()

    def emits(self) -> bool:
        """Return whether it has messages of pg_logical_emit_message()."""
        return self._counts().emitted > 0

    def count(self, tables: frozenset[int] | None) -> int:
        """Return the number of changes that iteration yields; with `tables`, only of these."""
        if tables is None:
            return self.body.count
        found = self._counts()
        return found.emitted + sum(n for oid, n in found.tables.items() if oid in tables)

    def _counts(self) -> _Counts:
        """Count its changes without decoding them, once for all consumers."""
        if self._found is None:
            self._found = self._count_all()
        return self._found

    def _count_all(self) -> _Counts:
        tables: Counter[int] = Counter()
        emitted, truncates = 0, False
        for key, number in self.body.mentioned().items():
            if key[0] in ROWS:
                tables[int.from_bytes(key[1:])] += number
            elif key[:1] == TRUNCATE:
                truncates = True
            else:
                emitted += number
        for entry in self.body.truncates() if truncates else ():
            message = parse(entry, HEADER)
            assert isinstance(message, TruncateMessage)
            tables.update(message.oids)
        return _Counts(tables, emitted)

    def __iter__(self) -> Iterator[Change | Truncate | Emitted]:
        """Yield the changes in the order in which they were made."""
        return self._changes(lambda relation: relation, self.relations)

    def only(self, oid: int, names: tuple[str, ...]) -> Iterator[Change | Truncate | Emitted]:
        """Yield the changes; of the rows of one table, only these columns are read."""

        def view(relation: Relation) -> Relation:
            return relation.only(names) if relation.oid == oid else relation

        known, relations = self.relations.get(oid), self.relations
        return self._changes(view, relations if known is None else {**relations, oid: view(known)})

    def emitted(self) -> Iterator[Emitted | None]:
        """Yield the messages of pg_logical_emit_message(), and None in place of all else."""
        for entry in self.body.entries():
            found = None
            if type(entry) is bytes and entry[HEADER] == _MESSAGE:
                message = parse(entry, HEADER)
                assert isinstance(message, LogicalMessage)
                found = Emitted(message.prefix, message.content)
            yield found

    def _changes(
        self, view: Callable[[Relation], Relation], relations: Mapping[int, Relation]
    ) -> Iterator[Change | Truncate | Emitted]:
        # Successive rows are mostly of the same table: look it up only when the oid changes.
        oid, relation = b"", None
        for entry in self.body.entries():
            if type(entry) is Relation:
                relations = {**relations, entry.oid: view(entry)}
                oid = b""
                continue
            assert type(entry) is bytes
            kind = KINDS.get(entry[HEADER])
            if kind is None:
                yield from self._others(entry, relations)
                continue
            if entry[_OID] != oid:
                oid = entry[_OID]
                relation = relations.get(int.from_bytes(oid))
            if relation is not None and len(oid) == 4:
                yield kind(relation, entry, _ROW)
            else:
                yield read_change(entry, HEADER, relations)

    def _others(
        self, entry: bytes, relations: Mapping[int, Relation]
    ) -> Iterator[Truncate | Emitted]:
        message = parse(entry, HEADER)
        if isinstance(message, LogicalMessage):
            yield Emitted(message.prefix, message.content)
            return
        assert isinstance(message, TruncateMessage)
        for oid in message.oids:
            if oid not in relations:
                raise DecodeError(f"a truncated table was not described before (oid {oid})")
            yield Truncate(
                relations[oid],
                cascade=message.cascade,
                restart_identity=message.restart_identity,
            )
