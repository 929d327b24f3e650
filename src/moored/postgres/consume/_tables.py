"""Tables as a consumer names them, and as the server's catalog has them.

A consumer names a table once; from then on it follows the table by its oid. Whatever makes the
server send less than all changes of the named table gives it another `Followed`: another oid (the
table was dropped and created, renamed, or swapped), another entry in the publication, or another
version of the publication itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from .._lsn import Lsn
from ..decode import Relation

__all__ = ["Followed", "Table", "TableName", "dump", "load", "mistakes", "parse_table"]

#: One part of a name: in double quotes as in SQL, or bare and without a dot.
_PART = r'(?:"(?:[^"\0]|"")+"|[^".\0][^.\0]*)'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")


class TableName(NamedTuple):
    """A table's name, and its schema if that was given."""

    schema: str | None
    name: str

    def matches(self, schema: str, name: str) -> bool:
        """Whether a table of this schema and name is meant."""
        return name == self.name and self.schema in (None, schema)


class Followed(NamedTuple):
    """The table that a consumer follows under a name, as it was when it was last confirmed."""

    oid: int
    schema: str
    name: str
    #: The rows of pg_publication_rel by which it is published; empty if by its schema, or as all.
    member: str
    #: Which publication, and which version of its row.
    publication: str

    def difference(self, now: Followed) -> str | None:
        """Why changes may have been missed between the two; None if none were."""
        table = f"{self.schema}.{self.name}"
        if now.oid != self.oid:
            return (
                f"{now.schema}.{now.name} is another table than before (oid {now.oid} instead of "
                f"{self.oid}): it was dropped and created again, renamed, or swapped"
            )
        if now.member != self.member:
            return f"the table {table} was taken out of the publication, and put back"
        if now.publication != self.publication:
            return f"the publication of the table {table} was changed, or made anew"
        return None

    def is_news(self, now: Relation) -> bool:
        """Whether the stream knows this table by another name, or another table by this name."""
        return (now.oid == self.oid) != ((now.schema, now.name) == (self.schema, self.name))


class Table(NamedTuple):
    """A row of the catalog about a table that somebody wants."""

    wanted: str
    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    #: Whether its changes come under its own name, and whether it is in the publication's list.
    published: bool
    listed: bool
    #: Whether updates and deletes can be told: otherwise the server refuses them, once published.
    keyed: bool
    member: str
    publication: str
    #: Whether the publication publishes all operations, and partitions as their whole.
    complete: bool
    via_root: bool
    #: Where the log ended when this was looked at.
    log_end: Lsn

    @property
    def followed(self) -> Followed:
        """What a consumer that is told of it now follows."""
        return Followed(self.oid, self.schema, self.name, self.member, self.publication)

    @classmethod
    def of(cls, row: Iterable[Any]) -> Self:
        """A row of the catalog's answer."""
        values = list(row)
        values[-1] = Lsn.parse(values[-1])  # not a number: a bigint ends where half of the log does
        return cls(*values)


def parse_table(text: str) -> TableName:
    """Read a table's name: `orders`, `shop.orders`, or `"a.schema"."a table"`."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the name of a table")
    schema, name = found.groups()
    return TableName(None if schema is None else _unquoted(schema), _unquoted(name))


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def mistakes(tables: object) -> list[str]:
    """What is wrong with the argument `tables`."""
    if not isinstance(tables, (list, tuple)):
        return [f"tables={tables!r} must be a list of names, such as ['orders', 'shop.customers']"]
    return [f"tables: {each!r} is not the name of a table" for each in tables if not _is_name(each)]


def _is_name(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(text.encode()) and bool(parse_table(text))
    except ValueError:
        return False


def dump(followed: Mapping[str, Followed]) -> str:
    """The tables that a consumer follows, as a string."""
    return json.dumps(followed)


def load(text: str | None) -> dict[str, Followed]:
    """The tables that `dump` wrote; none for None."""
    known = json.loads(text or "{}")
    return {name: Followed(*values) for name, values in known.items()}
