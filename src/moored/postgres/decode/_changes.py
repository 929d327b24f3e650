"""What a transaction did, one change after the other.

A change holds the bytes that it came in, and reads them when it is asked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, ClassVar

from .._errors import DecodeError
from ._rows import UNCHANGED, Relation, Row

__all__ = ["Change", "Delete", "Emitted", "Insert", "Truncate", "Update", "read_change"]

_oid = struct.Struct("!I").unpack_from
_NEW, _KEY, _OLD = b"NKO"


class _OfTable:
    """A change of a table."""

    __slots__ = ("relation",)

    #: The table as it was then: its columns, types and replica identity.
    relation: Relation

    @property
    def schema(self) -> str:
        """The schema of the table."""
        return self.relation.schema

    @property
    def table(self) -> str:
        """The name of the table, without its schema."""
        return self.relation.name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.relation.qualified}>"


class Change(_OfTable):
    """One change of a row of a table."""

    __slots__ = ("_data", "_rows")

    #: "insert", "update" or "delete".
    kind: ClassVar[str]

    def __init__(self, relation: Relation, data: bytes, at: int) -> None:
        self.relation = relation
        self._data = data
        # Where the rows begin; later, the rows. One attribute less is worth it here.
        self._rows: int | tuple[Row | None, Row | None] = at

    @property
    def old(self) -> Row | None:
        """The row before: its replica identity, or all of it; None where there was none."""
        rows = self._rows
        return (self._read(rows) if isinstance(rows, int) else rows)[0]

    @property
    def new(self) -> Row | None:
        """The row after; None where there is none."""
        rows = self._rows
        return (self._read(rows) if isinstance(rows, int) else rows)[1]

    def _read(self, at: int) -> tuple[Row | None, Row | None]:
        try:
            old, new = self._parse(self._data, at)
        except (struct.error, IndexError):
            raise DecodeError(f"a message of {self.relation.qualified} ends early") from None
        self._rows = rows = old, new
        return rows

    def _parse(self, data: bytes, at: int) -> tuple[Row | None, Row | None]:
        raise NotImplementedError

    def _expect_end(self, end: int) -> None:
        extra = len(self._data) - end
        if extra:
            raise DecodeError(f"a message of {self.relation.qualified} has {extra} bytes more")

    def _expect(self, found: int, allowed: bytes) -> None:
        if found not in allowed:
            raise DecodeError(
                f"a {self.kind} of {self.relation.qualified} holds a row of kind {found:#04x}"
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Change)
        return (self.relation.qualified, self.old, self.new) == (
            other.relation.qualified,
            other.old,
            other.new,
        )


class Insert(Change):
    """A row was inserted."""

    __slots__ = ()
    __match_args__ = ("table", "new")
    kind = "insert"

    @property
    def new(self) -> Row | None:
        """The new row."""
        # The most common question by far: the short way.
        at = self._rows
        if not isinstance(at, int):
            return at[1]
        try:
            new = self.relation.whole(self._data, at)
        except (struct.error, IndexError):
            raise DecodeError(f"a message of {self.relation.qualified} ends early") from None
        self._rows = None, new
        return new

    def _parse(self, data: bytes, at: int) -> tuple[None, Row]:
        return None, self.relation.whole(data, at)


class Update(Change):
    """A row was updated.

    A large value that the update did not touch is not sent: it is `UNCHANGED` in `new`, unless the
    replica identity is FULL, which tells it as part of the old row.
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
    """A table was emptied; one for each of several that were emptied together."""

    __slots__ = ("cascade", "restart_identity")
    __match_args__ = ("table",)
    kind: ClassVar[str] = "truncate"
    #: There is no row before or after; they are here so that all changes can be asked alike.
    old: ClassVar[None] = None
    new: ClassVar[None] = None

    def __init__(self, relation: Relation, *, cascade: bool, restart_identity: bool) -> None:
        self.relation = relation
        self.cascade = cascade
        self.restart_identity = restart_identity

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Truncate):
            return NotImplemented
        return (self.relation.qualified, self.cascade, self.restart_identity) == (
            other.relation.qualified,
            other.cascade,
            other.restart_identity,
        )


class Emitted:
    """A message that was written with pg_logical_emit_message()."""

    __slots__ = ("content", "prefix")
    __match_args__ = ("prefix", "content")
    kind: ClassVar[str] = "message"
    #: It is about no table; they are here so that all changes can be asked alike.
    schema: ClassVar[None] = None
    table: ClassVar[None] = None
    old: ClassVar[None] = None
    new: ClassVar[None] = None

    def __init__(self, prefix: str, content: bytes) -> None:
        self.prefix = prefix
        self.content = content

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Emitted):
            return NotImplemented
        return (self.prefix, self.content) == (other.prefix, other.content)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Emitted {self.prefix!r}, {len(self.content)} bytes>"


_KINDS: dict[int, type[Change]] = {ord("I"): Insert, ord("U"): Update, ord("D"): Delete}


def read_change(
    data: bytes, at: int, relations: Mapping[int, Relation], *, streamed: bool
) -> Change:
    """The change whose message begins here."""
    try:
        kind = _KINDS[data[at]]
        at += 5 if streamed else 1
        (oid,) = _oid(data, at)
        relation = relations[oid]
    except (struct.error, IndexError):
        raise DecodeError("a message of a row ends too early") from None
    except KeyError as error:
        raise DecodeError(
            f"a row of a table that was not described before (oid {error.args[0]})"
        ) from None
    return kind(relation, data, at + 4)


def xid_of(data: bytes, at: int) -> Any:
    """The transaction, or subtransaction, that a streamed message belongs to."""
    try:
        return _oid(data, at + 1)[0]
    except struct.error:
        raise DecodeError("a message of a row ends too early") from None
