"""Decode rows of pgoutput to Python values.

Values are loaded by psycopg's loaders, many of them in C, so that a value of the stream equals that
of a query.

The first rows of a table are read by general code, which handles every row; then code is generated
for the table (see `_rowcode`), which passes the rows that it cannot handle to the general code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import psycopg
from psycopg import pq

from .._errors import DecodeError
from ._checks import SIZES
from ._rowcode import MOST_COLUMNS, UNCHANGED, ColumnRecipe, row_reader, whole_reader
from ._types import BUILT_IN, FIRST_OWN, Types

__all__ = ["UNCHANGED", "Column", "Relation", "ReplicaIdentity", "Row"]

Row = dict[str, Any]

_short = struct.Struct("!H").unpack_from
# Unsigned: a negative size is then far outside of any message.
_size = struct.Struct("!I").unpack_from
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_NEW = ord("N")
_FORMS = {_TEXT: pq.Format.TEXT, _BINARY: pq.Format.BINARY}
_NOTHING = {_NULL: None, _UNCHANGED: UNCHANGED}
#: After so many rows, code is generated for a table; and how often it is generated again, when it
#: could not handle a row.
_ENOUGH, _TRIES = 3, 8
#: The errors of psycopg's loaders for a valid value that Python cannot represent.
_UNREPRESENTABLE = psycopg.DataError, psycopg.NotSupportedError


class ReplicaIdentity(Enum):
    """Which part of the old row PostgreSQL sends for an update or a delete."""

    #: The primary key.
    DEFAULT = "d"
    #: None: the server refuses updates and deletes.
    NOTHING = "n"
    #: The whole row.
    FULL = "f"
    #: The columns of an index.
    INDEX = "i"


class Column(NamedTuple):
    """A column of a table at the time of a change."""

    name: str
    type_oid: int
    #: The type modifier, as the 20 of varchar(20) in PostgreSQL's encoding; -1 for none.
    type_modifier: int
    #: Whether it is part of the replica identity.
    key: bool


class Relation:
    """A table at the time of a change; a change of its columns makes another `Relation`."""

    #: Reads the row at an offset of a message; returns the row and its end.
    row: Callable[[bytes, int], tuple[Row, int]]
    #: Reads a new row, from the "N" before it, that must end with its message.
    whole: Callable[[bytes, int], Row]

    def __init__(
        self,
        oid: int,
        schema: str,
        name: str,
        identity: ReplicaIdentity,
        columns: Sequence[Column],
    ) -> None:
        self.oid = oid
        self.schema = schema
        self.name = name
        self.identity = identity
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in self.columns)
        #: The name with its schema, as in "public.orders".
        self.qualified = f"{schema}.{name}"
        self._key_names = [column.name for column in self.columns if column.key]
        self.row = self._row
        self.whole = self._whole
        # How many rows the general code has read.
        self._general = 0
        # How often code was generated; the kinds of values that it reads, and whether it reads
        # values that Python cannot represent.
        self._tries = 0
        self._kinds = b""
        self._lenient = False
        #: The types of the database: set before the first row is read.
        self.types: Types = BUILT_IN
        #: The same table with all columns; itself unless it was made by `only`.
        self.full = self
        # The columns that are read; None for all. And the tables that `only` has made.
        self._chosen: frozenset[str] | None = None
        self._made: dict[tuple[str, ...], Relation] = {}

    def keys(self, data: bytes, at: int) -> tuple[Row, int]:
        """Return the replica identity of the row at this offset, and the end of the row.

        The other columns of such a row are sent as null, without a meaning.
        """
        row, end = self.row(data, at)
        return {name: row[name] for name in self._key_names}, end

    def only(self, names: tuple[str, ...]) -> Relation:
        """Return the same table, of whose rows only these columns are read."""
        if (made := self._made.get(names)) is None:
            made = Relation(self.oid, self.schema, self.name, self.identity, self.columns)
            made.types, made.full, made._chosen = self.types, self.full, frozenset(names)
            made._key_names = [name for name in made._key_names if name in made._chosen]
            self._made[names] = made
        return made

    # -- any row -------------------------------------------------------------------------------

    def _row(self, data: bytes, at: int) -> tuple[Row, int]:
        (count,) = _short(data, at)
        if count != len(self.columns):
            raise DecodeError(
                f"a row of {self.qualified} has {count} columns instead of {len(self.columns)}"
            )
        at += 2
        row: Row = {}
        kinds = bytearray()
        for column in self.columns:
            kind = data[at]
            kinds.append(kind)
            chosen = self._chosen is None or column.name in self._chosen
            if kind in _NOTHING:
                if chosen:
                    row[column.name] = _NOTHING[kind]
                at += 1
                continue
            if kind not in _FORMS:
                raise DecodeError(f"a value of {self.qualified} is of unknown kind {kind:#04x}")
            begin = at + 5
            at = begin + _size(data, at + 1)[0]
            if at > len(data):
                raise DecodeError(f"a value of {self.qualified} ends outside of its message")
            if chosen:
                row[column.name] = self._load(column, kind, data[begin:at])
        self._general += 1
        if self._general >= _ENOUGH:
            self._write(bytes(kinds))
        return row, at

    def _whole(self, data: bytes, at: int) -> Row:
        if data[at] != _NEW:
            raise DecodeError(f"a new row of {self.qualified} is of unknown kind {data[at]:#04x}")
        row, end = self._row(data, at + 1)
        if end != len(data):
            extra = len(data) - end
            raise DecodeError(f"a message of {self.qualified} has {extra} extra bytes")
        return row

    def _write(self, kinds: bytes) -> None:
        """Generate code for rows with these kinds of values, unless the current code is for them.

        If it is, it has failed for a value that Python cannot represent: then generate code that
        reads such values, too.
        """
        before = self._kinds or bytes([_BINARY if _BINARY in kinds else _TEXT]) * len(kinds)
        pairs = zip(kinds, before, strict=True)
        known = bytes(kind if kind in _FORMS else usual for kind, usual in pairs)
        lenient = self._lenient or known == self._kinds
        if (known, lenient) == (self._kinds, self._lenient) or self._tries >= _TRIES:
            return
        if len(kinds) > MOST_COLUMNS:
            return
        self._kinds, self._lenient = known, lenient
        self._tries += 1
        recipes = [
            self._recipe(column, kind, lenient)
            for column, kind in zip(self.columns, known, strict=True)
        ]
        self.row = row_reader(recipes, self._row)
        self.whole = whole_reader(recipes, self._whole)

    def _recipe(self, column: Column, kind: int, lenient: bool) -> ColumnRecipe:
        """Return how the generated code reads a column's values of this kind."""
        if self._chosen is not None and column.name not in self._chosen:
            return ColumnRecipe(column.name, kind, None, None, None)
        types, oid = self.types, self.types.base(column.type_oid)
        size = SIZES.get(oid) if kind == _BINARY else None
        check = types.text_check(oid) if kind == _TEXT else None if size else types.check(oid)
        load = types.loader(oid, _FORMS[kind], lenient=lenient)
        return ColumnRecipe(column.name, kind, size, load, check)

    def _load(self, column: Column, kind: int, value: bytes) -> Any:
        """Load a value; raise `DecodeError` if it is not valid for its type.

        A value that Python cannot represent (infinity, the year 12000, 24:00) becomes the string
        that PostgreSQL writes for it; in binary format, other values than infinities stay bytes.
        Within an array or a range, only that element. A valid value in text format that cannot be
        loaded stays a string. A value of a type that is not built in and was changed since it was
        described stays a string or bytes.
        """
        types, oid = self.types, self.types.base(column.type_oid)
        try:
            try:
                check = (types.check if kind == _BINARY else types.text_check)(oid)
                if check is not None:
                    check(value)
                return types.loader(oid, _FORMS[kind], lenient=True)(value)
            except Exception as error:
                text = kind == _TEXT and isinstance(error, _UNREPRESENTABLE)
                if oid < FIRST_OWN and not text:
                    raise
                return value.decode() if kind == _TEXT else value
        except Exception as error:  # loaders of psycopg or of the user may raise anything
            raise DecodeError(
                f"the value of {self.qualified}.{column.name} is not valid for its type "
                f"(oid {oid}): {error}"
            ) from error

    def __repr__(self) -> str:
        return f"<Relation {self.qualified} ({', '.join(self.names)})>"
