"""Rows as pgoutput sends them, and their values as Python has them.

A row stays bytes until somebody looks at it. Values are loaded by psycopg's own loaders, many of
them in C, so that a value from the stream is what a query would have given.

The first rows of a table are read in the general way, which knows everything; then code is written
for the others (see `_rowcode`), which comes back here with what it does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import pq
from psycopg.abc import Buffer, Transformer

from .._errors import DecodeError
from ._checks import SIZES, Check, check_of, text_check_of
from ._loaders import lenient_transformer, transformer
from ._rowcode import MOST_COLUMNS, ColumnRecipe, row_reader, whole_reader

__all__ = ["UNCHANGED", "Column", "Relation", "ReplicaIdentity", "Row", "Unchanged"]

Row = dict[str, Any]

_short = struct.Struct("!H").unpack_from
# Without a sign: what would be negative is then far outside of any message.
_size = struct.Struct("!I").unpack_from
_head = struct.Struct("!BI").pack
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_NEW = ord("N")
_VALUES, _NOTHING = b"tb", b"nu"
#: For so many makes of rows of one table what loads them is kept.
_MAKES = 64
_FORMS = {_TEXT: pq.Format.TEXT, _BINARY: pq.Format.BINARY}
#: After so many rows code is written for the others, and so often anew when it did not fit.
_ENOUGH, _TRIES = 3, 8


class Unchanged(Enum):
    """The value of a large column that an update did not touch: PostgreSQL does not send it."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged.UNCHANGED


class ReplicaIdentity(Enum):
    """What PostgreSQL tells of the old row of an update or a delete."""

    #: The primary key.
    DEFAULT = "d"
    #: Nothing: updates and deletes are refused by the server.
    NOTHING = "n"
    #: The whole row.
    FULL = "f"
    #: The columns of an index.
    INDEX = "i"


class Column(NamedTuple):
    """A column of a table, as it was when the change was made."""

    name: str
    type_oid: int
    #: What the type was declared with, as the 20 of varchar(20); -1 for nothing.
    type_modifier: int
    #: Whether it is part of the replica identity.
    key: bool


class Relation:
    """A table as it was when a change was made; another one after each change of its columns."""

    __slots__ = (
        "_general",
        "_key_names",
        "_kinds",
        "_lenient",
        "_make",
        "_makes",
        "_tries",
        "columns",
        "identity",
        "name",
        "names",
        "oid",
        "qualified",
        "row",
        "schema",
        "whole",
    )

    #: Reads the row that begins at a place of a message; returns it, and where it ends.
    row: Callable[[bytes, int], tuple[Row, int]]
    #: Reads a new row, from the "N" before it, that must go to the end of its message.
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
        self._makes: dict[bytes, _Make] = {}
        # What the last row was like; at first, nothing but nulls.
        self._make = _Make(self.columns, bytes([_NULL]) * len(self.columns))
        self.row = self._row
        self.whole = self._whole
        # How many rows were read in the general way, and what the written code knows.
        self._general = 0
        self._tries = 0
        self._kinds = b""
        self._lenient = False

    def keys(self, data: bytes, at: int) -> tuple[Row, int]:
        """The replica identity in the row that begins here, and where it ends.

        The other columns of such a row are sent as null, which means nothing.
        """
        row, end = self.row(data, at)
        return {name: row[name] for name in self._key_names}, end

    # -- any row -------------------------------------------------------------------------------

    def _row(self, data: bytes, at: int) -> tuple[Row, int]:
        make, fields, end = self._fields(data, at, self._make)
        row = dict(zip(self.names, self._load(make, fields), strict=True))
        self._general += 1
        if self._general >= _ENOUGH:
            self._write(make)
        return row, end

    def _whole(self, data: bytes, at: int) -> Row:
        if data[at] != _NEW:
            raise DecodeError(f"{self.qualified} has a new row of kind {data[at]:#04x}")
        row, end = self._row(data, at + 1)
        if end != len(data):
            extra = len(data) - end
            raise DecodeError(f"a message of {self.qualified} has {extra} bytes more")
        return row

    def _write(self, make: _Make) -> None:
        """Write code that reads rows like this one, unless there is such code already."""
        known = self._kinds or bytes([_BINARY if _BINARY in make.kinds else _TEXT]) * len(
            make.kinds
        )
        kinds = bytes(
            kind if kind in _VALUES else before
            for kind, before in zip(make.kinds, known, strict=True)
        )
        lenient = self._lenient or make.lenient
        if (kinds, lenient) == (self._kinds, self._lenient) or self._tries >= _TRIES:
            return
        if len(kinds) > MOST_COLUMNS:
            return
        self._kinds, self._lenient = kinds, lenient
        self._tries += 1
        recipes = [
            _recipe(column, kind, lenient) for column, kind in zip(self.columns, kinds, strict=True)
        ]
        self.row = row_reader(recipes, self._row)
        self.whole = whole_reader(recipes, self._whole)

    def _fields(self, data: bytes, at: int, make: _Make) -> tuple[_Make, list[bytes | None], int]:
        """The bytes of each value.

        Rows of a table are mostly of the same make (which values are null, text, binary), so the
        make of the last one is tried first.
        """
        (count,) = _short(data, at)
        if count != len(make.parts):
            raise DecodeError(
                f"a row of {self.qualified} has {count} columns instead of {len(self.columns)}"
            )
        begin = at
        at += 2
        fields: list[bytes | None] = []
        append = fields.append
        for kind, head, size in make.parts:
            value = at + 5
            if head is not None:
                if data[at:value] != head:
                    break
                at = value + size
                append(data[value:at])
            elif data[at] != kind:
                break
            elif size:
                at = value + _size(data, at + 1)[0]
                append(data[value:at])
            else:
                at += 1
                append(None)
        else:
            if at > len(data):
                raise DecodeError(f"a value of {self.qualified} ends outside of its message")
            return make, fields, at
        self._make = self._make_of(data, begin)
        return self._fields(data, begin, self._make)

    def _make_of(self, data: bytes, at: int) -> _Make:
        """What the row that begins here is like."""
        kinds = bytearray()
        at += 2
        for column in self.columns:
            kind = data[at]
            kinds.append(kind)
            if kind in _NOTHING:
                at += 1
                continue
            if kind not in _VALUES:
                raise DecodeError(f"a value of {self.qualified} is of unknown kind {kind:#04x}")
            (size,) = _size(data, at + 1)
            if kind == _BINARY and size != SIZES.get(column.type_oid, size):
                raise self._unsound(column, f"it has {size} bytes")
            at += 5 + size
        return self._known(bytes(kinds))

    def _known(self, kinds: bytes) -> _Make:
        make = self._makes.get(kinds)
        if make is None:
            if len(self._makes) >= _MAKES:
                self._makes.clear()
            make = self._makes[kinds] = _Make(self.columns, kinds)
        return make

    def _load(self, make: _Make, fields: list[bytes | None]) -> Sequence[Any]:
        try:
            values = make.load(fields)
        except Exception:  # what loads is psycopg's, or the user's: anything may come
            values = self._load_leniently(make, fields)
        if make.unchanged:
            marks = zip(values, make.kinds, strict=True)
            return [UNCHANGED if kind == _UNCHANGED else value for value, kind in marks]
        return values

    def _load_leniently(self, make: _Make, fields: list[bytes | None]) -> tuple[Any, ...]:
        """The values of a row with one that Python cannot hold, and other rows like it from now on.

        Such a value (infinity, the year 12000, 24:00) comes as PostgreSQL writes it, whether it was
        sent as text or binary; within an array or a range, only that part of it.
        """
        make.relent()
        try:
            return make.load(fields)
        except Exception:
            columns = zip(fields, make.kinds, self.columns, strict=True)
            return tuple(self._load_one(*each) for each in columns)

    def _load_one(self, field: bytes | None, kind: int, column: Column) -> Any:
        """A value by itself; one that cannot be of its type is a `DecodeError`.

        What else cannot be loaded stays the text that it is, if it is one.
        """
        if field is None:
            return None
        try:
            check = (check_of if kind == _BINARY else text_check_of)(column.type_oid)
            if check is not None:
                check(field)
            try:
                return lenient_transformer().get_loader(column.type_oid, _FORMS[kind]).load(field)
            except (psycopg.DataError, psycopg.NotSupportedError):
                if kind == _BINARY:
                    raise
                return field.decode()
        except Exception as error:
            raise self._unsound(column, str(error)) from error

    def _unsound(self, column: Column, why: str) -> DecodeError:
        return DecodeError(
            f"the value of {self.qualified}.{column.name} is not one of its type "
            f"(oid {column.type_oid}): {why}"
        )

    def __repr__(self) -> str:
        return f"<Relation {self.qualified} ({', '.join(self.names)})>"


class _Make:
    """What rows of one make are like, and what loads their values."""

    __slots__ = (
        "_binary",
        "_checks",
        "_oids",
        "_text",
        "kinds",
        "lenient",
        "load",
        "parts",
        "unchanged",
    )

    load: Callable[[Sequence[Buffer | None]], tuple[Any, ...]]

    def __init__(self, columns: Sequence[Column], kinds: bytes) -> None:
        self._oids = [column.type_oid for column in columns]
        self.kinds = kinds
        self.unchanged = _UNCHANGED in kinds
        pairs = list(zip(kinds, self._oids, strict=True))
        #: For each value its kind; if all of its type have the same size, the bytes before it
        #: (always the same, and quicker to compare than to read) with that size; else whether
        #: there is a value.
        self.parts = [_part(*pair) for pair in pairs]
        self._checks = [
            (place, check)
            for place, pair in enumerate(pairs)
            if (check := _check(*pair)) is not None
        ]
        #: Whether what Python cannot hold is loaded as its text.
        self.lenient = False
        self._choose(transformer(), transformer())

    def relent(self) -> None:
        """From now on, load what Python cannot hold as its text."""
        self.lenient = True
        self._choose(lenient_transformer(), lenient_transformer())

    def _choose(self, text: Transformer, binary: Transformer) -> None:
        text.set_loader_types(self._oids, pq.Format.TEXT)
        binary.set_loader_types(self._oids, pq.Format.BINARY)
        self._text, self._binary = text, binary
        if self._checks or (_TEXT in self.kinds and _BINARY in self.kinds):
            self.load = self._load_with_care
        else:
            self.load = (binary if _BINARY in self.kinds else text).load_sequence

    def _load_with_care(self, fields: Sequence[Buffer | None]) -> tuple[Any, ...]:
        """Some values are text and some are binary, or of types that must be checked."""
        for place, check in self._checks:
            field = fields[place]
            assert isinstance(field, bytes)
            check(field)
        if _TEXT not in self.kinds:
            return self._binary.load_sequence(fields)
        if _BINARY not in self.kinds:
            return self._text.load_sequence(fields)
        pairs = list(zip(fields, self.kinds, strict=True))
        text = self._text.load_sequence([f if kind == _TEXT else None for f, kind in pairs])
        binary = self._binary.load_sequence([f if kind == _BINARY else None for f, kind in pairs])
        return tuple(b if t is None else t for t, b in zip(text, binary, strict=True))


def _part(kind: int, oid: int) -> tuple[int, bytes | None, int]:
    if kind == _BINARY and oid in SIZES:
        return kind, _head(kind, SIZES[oid]), SIZES[oid]
    return kind, None, kind in _VALUES


def _check(kind: int, oid: int) -> Check | None:
    """What must be looked at before it is loaded; a size that is fixed was compared already."""
    if kind == _BINARY:
        return None if oid in SIZES else check_of(oid)
    return text_check_of(oid) if kind == _TEXT else None


def _recipe(column: Column, kind: int, lenient: bool) -> ColumnRecipe:
    """How the written code reads a column's values, when they are of this kind."""
    oid = column.type_oid
    loaders = lenient_transformer() if lenient else transformer()
    load = loaders.get_loader(oid, _FORMS[kind]).load
    size = SIZES.get(oid) if kind == _BINARY else None
    return ColumnRecipe(column.name, kind, size, load, _check(kind, oid))
