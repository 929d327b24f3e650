"""Tables as a consumer names them, and as the server's catalog describes them.

A consumer names a table once; from then on it follows the table by its oid. Whenever the server may
have left out changes of the named table, its `Followed` is another one: another oid (the table was
dropped and created again, renamed, or swapped), another entry in the publication, another
version of the publication itself, or columns whose values ALTER TABLE has written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from psycopg import sql

from .._lsn import Lsn
from ..decode import Relation
from ._schema_changes import Columns, SchemaChanged, altered

__all__ = ["Followed", "Table", "TableName", "dump", "load", "mistakes", "parse_table", "shortened"]

#: How many names `shortened` returns.
SHOWN = 3

#: One part of a name: in double quotes as in SQL, or bare and without a dot.
_PART = r'(?:"(?:[^"\0]|"")+"|[^".\0][^.\0]*)'
_NAME = re.compile(rf"(?:({_PART})\.)?({_PART})")


class TableName(NamedTuple):
    """A table's name, and its schema if that was given."""

    schema: str | None
    name: str

    def matches(self, schema: str, name: str) -> bool:
        """Return whether it names a table of this schema and name."""
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
    columns: Columns | None = None
    #: By their oids and the transactions that made them partitions: the name, and whether it was
    #: created before that and has rows. None for a consumer without a copy.
    partitions: Mapping[str, Sequence[Any]] | None = None

    def difference(self, now: Followed) -> str | None:
        """Return why changes may have been missed between the two; None if none were."""
        table = f"{self.schema}.{self.name}"
        if now.oid != self.oid:
            return (
                f"{now.schema}.{now.name} is another table than before (oid {now.oid} instead of "
                f"{self.oid}): it was dropped and created again, renamed, or swapped"
            )
        if now.member != self.member:
            return f"the table {table} was removed from the publication and added again"
        if now.publication != self.publication:
            return f"the publication of the table {table} was changed or created again"
        if rewritten := self._rewritten(now):
            return (
                f"ALTER TABLE has changed the rows of {table} without published changes: a column "
                f"has another type, or was added with a default ({', '.join(rewritten)})"
            )
        if moved := self._moved(now):
            return (
                f"partitions of {table} were dropped or detached, or attached with rows, without "
                f"published changes ({', '.join(moved)})"
            )
        return None

    def altered(self, now: Followed) -> SchemaChanged | None:
        """Return how the columns of the same table differ; None if they do not."""
        return altered(f"{now.schema}.{now.name}", self.columns, now.columns)

    def _moved(self, now: Followed) -> list[str]:
        """Return the partitions that have removed rows from the table, or added rows to it."""
        before, after = self.partitions, now.partitions
        if before is None or after is None:
            return []
        gone = [name for key, (name, _) in before.items() if key not in after]
        return gone + [name for key, (name, full) in after.items() if full and key not in before]

    def _rewritten(self, now: Followed) -> list[str]:
        """Return the columns whose values are others than before, also in unchanged rows."""
        known, found = self.columns, []
        for number, (name, oid, modifier, default, *_) in (now.columns or {}).items():
            before = None if known is None else known.get(number)
            kind = [oid, modifier]
            if known is not None and (default if before is None else [*before[1:3]] != kind):
                found.append(name)
        return found

    def contradicts(self, now: Relation) -> bool:
        """Return whether the stream has this table by another name, or another by this name.

        Or with a column that was not known.
        """
        named = (now.schema, now.name) == (self.schema, self.name)
        if (now.oid == self.oid) != named:
            return True
        if not named or self.columns is None:
            return False
        known = {(name, oid) for name, oid, *_ in self.columns.values()}
        return any((each.name, each.type_oid) not in known for each in now.columns)


class Table(NamedTuple):
    """A table that a consumer wants, as the server's catalog describes it."""

    wanted: str
    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    #: Whether its changes are published under its own name, and the row of pg_publication_rel by
    #: which the publication lists it; 0 if it does not.
    published: bool
    listed: int
    #: Itself or the partitions without a replica identity: once they are published, the server
    #: refuses UPDATE and DELETE.
    keyless: Sequence[str]
    member: str
    publication: str
    #: Whether the publication publishes all operations, and partitions as their parent.
    complete: bool
    via_root: bool
    columns: Columns
    partitions: Mapping[str, Sequence[Any]]
    #: The end of the WAL at the time of the query.
    log_end: Lsn

    @property
    def followed(self) -> Followed:
        """What a consumer follows from now on."""
        return Followed(
            self.oid,
            self.schema,
            self.name,
            self.member,
            self.publication,
            self.columns,
            self.partitions,
        )

    @property
    def is_new(self) -> bool:
        """Whether it must be added to the publication."""
        return not self.published and not self.listed

    @property
    def exact(self) -> str:
        """Its name with its schema."""
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        """The table as SQL, with its partitions, but without the tables that inherit from it.

        These would be published, too, and without a replica identity the server would refuse their
        UPDATE and DELETE.
        """
        only = "" if self.kind == "p" else "ONLY "
        return only + sql.Identifier(self.schema, self.name).as_string(None)

    @classmethod
    def of(cls, row: Iterable[Any]) -> Self:
        """Return the table of a row of the catalog query."""
        values = list(row)
        values[-1] = Lsn.parse(values[-1])  # a text, because a bigint cannot hold every LSN
        return cls(*values)


def parse_table(text: str) -> TableName:
    """Parse a table's name: `orders`, `shop.orders`, or `"a.schema"."a table"`."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the name of a table")
    schema, name = found.groups()
    return TableName(None if schema is None else _unquoted(schema), _unquoted(name))


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def mistakes(tables: object, consumer: object = "default") -> list[str]:
    """Return what is wrong with the arguments `tables` and `consumer`."""
    wrong = []
    if not _is_text(consumer):
        wrong.append(f"consumer={consumer!r} must be a str, without NUL and surrogates")
    if not isinstance(tables, (list, tuple)):
        example = "['orders', 'shop.customers']"
        return [*wrong, f"tables={tables!r} must be a list of names, such as {example}"]
    names = [each for each in tables if not _is_text(each) or not _is_name(each)]
    return [*wrong, *(f"tables: {each!r} is not the name of a table" for each in names)]


def _is_text(value: object) -> bool:
    """Return whether the state file and the database can store it."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _is_name(text: str) -> bool:
    try:
        return bool(parse_table(text))
    except ValueError:
        return False


def shortened(names: Iterable[str]) -> str:
    """Return names as text, the first ones only if there are many."""
    found = sorted(names)
    more = len(found) - SHOWN
    shown = ", ".join(found if more <= 1 else found[:SHOWN])
    return f"{shown} and {more} others" if more > 1 else shown


def dump(followed: Mapping[str, Followed]) -> str:
    """Serialize the tables that a consumer follows."""
    return json.dumps(followed)


def load(text: str | None) -> dict[str, Followed]:
    """Return the tables that `dump` has serialized; none for None."""
    known = json.loads(text or "{}")
    return {name: Followed(*values) for name, values in known.items()}
