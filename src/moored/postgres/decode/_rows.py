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
# Unsigned: a negative size is then far outside of any message.
_size = struct.Struct("!I").unpack_from
_head = struct.Struct("!BI").pack
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_NEW = ord("N")
_VALUES, _NOTHING = b"tb", b"nu"
#: The number of shapes of rows that are kept for one table.
_MAX_SHAPES = 64
_FORMS = {_TEXT: pq.Format.TEXT, _BINARY: pq.Format.BINARY}
#: After so many rows, code is generated for a table; and how often it is generated again, when it
#: could not handle a row.
_ENOUGH, _TRIES = 3, 8


class Unchanged(Enum):
    """The value of a large column that an update did not change: PostgreSQL does not send it."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged.UNCHANGED


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

    __slots__ = (
        "_general",
        "_key_names",
        "_kinds",
        "_lenient",
        "_shape",
        "_shapes",
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
        self._shapes: dict[bytes, _RowShape] = {}
        # The shape of the last row; at first, only nulls.
        self._shape = _RowShape(self.columns, bytes([_NULL]) * len(self.columns))
        self.row = self._row
        self.whole = self._whole
        # How many rows the general code has read, and what the generated code can handle.
        self._general = 0
        self._tries = 0
        self._kinds = b""
        self._lenient = False

    def keys(self, data: bytes, at: int) -> tuple[Row, int]:
        """Return the replica identity of the row at this offset, and the end of the row.

        The other columns of such a row are sent as null, without a meaning.
        """
        row, end = self.row(data, at)
        return {name: row[name] for name in self._key_names}, end

    # -- any row -------------------------------------------------------------------------------

    def _row(self, data: bytes, at: int) -> tuple[Row, int]:
        shape, fields, end = self._fields(data, at, self._shape)
        row = dict(zip(self.names, self._load(shape, fields), strict=True))
        self._general += 1
        if self._general >= _ENOUGH:
            self._write(shape)
        return row, end

    def _whole(self, data: bytes, at: int) -> Row:
        if data[at] != _NEW:
            raise DecodeError(f"a new row of {self.qualified} is of unknown kind {data[at]:#04x}")
        row, end = self._row(data, at + 1)
        if end != len(data):
            extra = len(data) - end
            raise DecodeError(f"a message of {self.qualified} has {extra} extra bytes")
        return row

    def _write(self, shape: _RowShape) -> None:
        """Generate code that reads rows of this shape, unless the current code can."""
        known = self._kinds or bytes([_BINARY if _BINARY in shape.kinds else _TEXT]) * len(
            shape.kinds
        )
        kinds = bytes(
            kind if kind in _VALUES else before
            for kind, before in zip(shape.kinds, known, strict=True)
        )
        lenient = self._lenient or shape.lenient
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

    def _fields(
        self, data: bytes, at: int, shape: _RowShape
    ) -> tuple[_RowShape, list[bytes | None], int]:
        """Return the shape of a row, the bytes of its values, and its end.

        Most rows of a table have the same shape (which values are null, text or binary), so that of
        the last row is tried first.
        """
        (count,) = _short(data, at)
        if count != len(shape.parts):
            raise DecodeError(
                f"a row of {self.qualified} has {count} columns instead of {len(self.columns)}"
            )
        begin = at
        at += 2
        fields: list[bytes | None] = []
        append = fields.append
        for kind, head, size in shape.parts:
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
            return shape, fields, at
        self._shape = self._shape_of(data, begin)
        return self._fields(data, begin, self._shape)

    def _shape_of(self, data: bytes, at: int) -> _RowShape:
        """Return the shape of the row at this offset."""
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
                raise self._invalid(column, f"it has {size} bytes")
            at += 5 + size
        return self._known(bytes(kinds))

    def _known(self, kinds: bytes) -> _RowShape:
        shape = self._shapes.get(kinds)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[kinds] = _RowShape(self.columns, kinds)
        return shape

    def _load(self, shape: _RowShape, fields: list[bytes | None]) -> Sequence[Any]:
        try:
            values = shape.load(fields)
        except Exception:  # loaders of psycopg or of the user may raise anything
            values = self._load_leniently(shape, fields)
        if shape.unchanged:
            marks = zip(values, shape.kinds, strict=True)
            return [UNCHANGED if kind == _UNCHANGED else value for value, kind in marks]
        return values

    def _load_leniently(self, shape: _RowShape, fields: list[bytes | None]) -> tuple[Any, ...]:
        """Load a row with values that Python cannot represent, and later rows of its shape as well.

        Such a value (infinity, the year 12000, 24:00) becomes the string that PostgreSQL writes for
        it, in text and in binary format; within an array or a range, only that element.
        """
        shape.make_lenient()
        try:
            return shape.load(fields)
        except Exception:
            columns = zip(fields, shape.kinds, self.columns, strict=True)
            return tuple(self._load_one(*each) for each in columns)

    def _load_one(self, field: bytes | None, kind: int, column: Column) -> Any:
        """Load one value; raise `DecodeError` if it is not valid for its type.

        A valid value in text format that cannot be loaded stays a string.
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
            raise self._invalid(column, str(error)) from error

    def _invalid(self, column: Column, why: str) -> DecodeError:
        return DecodeError(
            f"the value of {self.qualified}.{column.name} is not valid for its type "
            f"(oid {column.type_oid}): {why}"
        )

    def __repr__(self) -> str:
        return f"<Relation {self.qualified} ({', '.join(self.names)})>"


class _RowShape:
    """The kinds of the values of a row (null, unchanged, text, binary), and their loaders."""

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
        #: For each value its kind; for a type of fixed size, the five bytes before it (constant,
        #: and faster to compare than to parse) and that size; else None and whether it has a value.
        self.parts = [_part(*pair) for pair in pairs]
        self._checks = [
            (place, check)
            for place, pair in enumerate(pairs)
            if (check := _check(*pair)) is not None
        ]
        #: Whether values that Python cannot represent are loaded as strings.
        self.lenient = False
        self._choose(transformer(), transformer())

    def make_lenient(self) -> None:
        """From now on, load values that Python cannot represent as strings."""
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
        """Load values of which some are text and some binary, or which must be checked."""
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
    """Return the check before a value is loaded; a fixed size was compared already."""
    if kind == _BINARY:
        return None if oid in SIZES else check_of(oid)
    return text_check_of(oid) if kind == _TEXT else None


def _recipe(column: Column, kind: int, lenient: bool) -> ColumnRecipe:
    """Return how the generated code reads a column's values of this kind."""
    oid = column.type_oid
    loaders = lenient_transformer() if lenient else transformer()
    load = loaders.get_loader(oid, _FORMS[kind]).load
    size = SIZES.get(oid) if kind == _BINARY else None
    return ColumnRecipe(column.name, kind, size, load, _check(kind, oid))
