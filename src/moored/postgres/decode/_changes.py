"""The changes of a transaction.

A change holds the bytes of its message, and decodes them when its rows are first read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .._errors import DecodeError
from ._rows import UNCHANGED, Relation, Row

__all__ = ["KINDS", "Change", "Delete", "Emitted", "Insert", "Truncate", "Update", "read_change"]

_oid = struct.Struct("!I").unpack_from
_NEW, _KEY, _OLD = b"NKO"


class _OfTable:
    """A change that belongs to a table."""

    __slots__ = ("relation",)

    #: The table at the time of the change: its columns, types and replica identity.
    relation: Relation

    @property
    def schema(self) -> str:
        """The schema of the table."""
        return self.relation.schema

    @property
    def table(self) -> str:
        """The name of the table, without its schema."""
        return self.relation.name

    def _compared(self) -> tuple[object, ...]:
        """Return what makes two changes of the same kind equal."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _OfTable) or type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.relation.qualified}>"


class Change(_OfTable):
    """A change of a row."""

    __slots__ = ("_data", "_rows")

    #: "insert", "update" or "delete".
    kind: ClassVar[str]

    def __init__(self, relation: Relation, data: bytes, at: int) -> None:
        self.relation = relation
        self._data = data
        # The offset of the rows until they are decoded, then the rows: one attribute saves memory.
        self._rows: int | tuple[Row | None, Row | None] = at

    @property
    def old(self) -> Row | None:
        """The row before the change: its replica identity, or all of it; None if there is none."""
        rows = self._rows
        return (self._read(rows) if isinstance(rows, int) else rows)[0]

    @property
    def new(self) -> Row | None:
        """The row after the change; None if there is none."""
        rows = self._rows
        return (self._read(rows) if isinstance(rows, int) else rows)[1]

    def _read(self, at: int) -> tuple[Row | None, Row | None]:
        try:
            old, new = self._parse(self._data, at)
        except (struct.error, IndexError):
            raise DecodeError(f"a message of {self.relation.qualified} is truncated") from None
        self._rows = rows = old, new
        return rows

    def _parse(self, data: bytes, at: int) -> tuple[Row | None, Row | None]:
        raise NotImplementedError

    def _expect_end(self, end: int) -> None:
        extra = len(self._data) - end
        if extra:
            raise DecodeError(f"a message of {self.relation.qualified} has {extra} extra bytes")

    def _expect(self, found: int, allowed: bytes) -> None:
        if found not in allowed:
            raise DecodeError(
                f"a {self.kind} of {self.relation.qualified} has a row of unknown kind {found:#04x}"
            )

    def _compared(self) -> tuple[object, ...]:
        return self.relation.qualified, self.old, self.new


class _Written(Change):
    """A change after which there is a row."""

    __slots__ = ()

    @property
    def new(self) -> Row | None:
        """The new row."""
        # The fast path for the most common change: without an old row.
        at, data = self._rows, self._data
        if not isinstance(at, int):
            return at[1]
        if len(data) <= at or data[at] != _NEW:
            return self._read(at)[1]
        try:
            new = self.relation.whole(data, at)
        except (struct.error, IndexError):
            raise DecodeError(f"a message of {self.relation.qualified} is truncated") from None
        self._rows = None, new
        return new


class Insert(_Written):
    """A row was inserted."""

    __slots__ = ()
    __match_args__ = ("table", "new")
    kind = "insert"

    def _parse(self, data: bytes, at: int) -> tuple[None, Row]:
        return None, self.relation.whole(data, at)


class Update(_Written):
    """A row was updated.

    The server does not send a large value that the update did not change: it is `UNCHANGED` in
    `new`, unless the replica identity is FULL, which includes it in the old row.
    """

    __slots__ = ()
    __match_args__ = ("table", "old", "new")
    kind = "update"

    def _parse(self, data: bytes, at: int) -> tuple[Row | None, Row]:
        relation, first = self.relation, data[at]
        if first == _NEW:
            return None, relation.whole(data, at)
        self._expect(first, b"NKO")
        old, at = (relation.keys if first == _KEY else relation.row)(data, at + 1)
        new = relation.whole(data, at)
        if first == _OLD and UNCHANGED in new.values():
            new = {k: old[k] if v is UNCHANGED else v for k, v in new.items()}
        return old, new


class Delete(Change):
    """A row was deleted."""

    __slots__ = ()
    __match_args__ = ("table", "old")
    kind = "delete"

    def _parse(self, data: bytes, at: int) -> tuple[Row, None]:
        self._expect(data[at], b"KO")
        read = self.relation.keys if data[at] == _KEY else self.relation.row
        old, end = read(data, at + 1)
        self._expect_end(end)
        return old, None


class Truncate(_OfTable):
    """A table was truncated; one `Truncate` for each table of a TRUNCATE statement."""

    __slots__ = ("cascade", "restart_identity")
    __match_args__ = ("table",)
    kind: ClassVar[str] = "truncate"
    #: There are no rows; these exist so that all kinds of changes have the same attributes.
    old: ClassVar[None] = None
    new: ClassVar[None] = None

    def __init__(self, relation: Relation, *, cascade: bool, restart_identity: bool) -> None:
        self.relation = relation
        self.cascade = cascade
        self.restart_identity = restart_identity

    def _compared(self) -> tuple[object, ...]:
        return self.relation.qualified, self.cascade, self.restart_identity


@dataclass(slots=True)
class Emitted:
    """A message of pg_logical_emit_message()."""

    prefix: str
    content: bytes
    kind: ClassVar[str] = "message"
    #: There is no table; these exist so that all kinds of changes have the same attributes.
    schema: ClassVar[None] = None
    table: ClassVar[None] = None
    old: ClassVar[None] = None
    new: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"<Emitted {self.prefix!r}, {len(self.content)} bytes>"


KINDS: dict[int, type[Change]] = {ord("I"): Insert, ord("U"): Update, ord("D"): Delete}


def read_change(data: bytes, at: int, relations: Mapping[int, Relation]) -> Change:
    """Return the change whose message begins here."""
    try:
        kind = KINDS[data[at]]
        (oid,) = _oid(data, at + 1)
        relation = relations[oid]
    except (struct.error, IndexError):
        raise DecodeError("the message of a row is truncated") from None
    except KeyError as error:
        raise DecodeError(
            f"a change of a table that was not described before (oid {error.args[0]})"
        ) from None
    return kind(relation, data, at + 5)
