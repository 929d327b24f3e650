"""The table that is copied: its columns and key, and the SQL that reads it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer

from .._errors import ConfigurationError, PostgresError
from ..consume._tables import parse_table
from ..decode import UNCHANGED, Row
from ._join import Key
from ._position import CopyVersion

__all__ = [
    "DISPLAY",
    "MARKER",
    "ColumnsChanged",
    "KeyColumn",
    "KeyValues",
    "SourceTable",
    "describe_table",
    "writers",
]

#: So that values are written as the stream has them. Row-level security is an error instead of a
#: copy without the rows that it hides: the stream has their changes.
DISPLAY = (
    "SET LOCAL bytea_output = 'hex'; SET LOCAL DateStyle = 'ISO, DMY'; SET LOCAL TimeZone = 'UTC'; "
    "SET LOCAL extra_float_digits = 1; SET LOCAL IntervalStyle = 'postgres'; "
    "SET LOCAL row_security = off"
)

#: An expression that is another one after the table `oid` was altered, renamed or dropped. Each
#: ALTER TABLE of a column writes its row in the catalog again, also one that leaves its type as it
#: is and changes its values.
MARKER = (
    "(SELECT md5(%(oid)s::regclass || string_agg(a.attnum || '/' || a.xmin, ',' "
    "ORDER BY a.attnum)) FROM pg_attribute a "
    "WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped)"
)
_TABLE = """
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, pg_is_in_recovery(),
  (SELECT coalesce(sum(leaf.reltuples) FILTER (WHERE leaf.reltuples > 0), 0)::bigint
   FROM pg_class leaf WHERE leaf.relkind <> 'p'
     AND leaf.oid IN (SELECT c.oid UNION SELECT t.relid FROM pg_partition_tree(c.oid) t)),
  k.indexrelid,
  (SELECT p.oid || '/' || coalesce(string_agg(r.oid::text, ',' ORDER BY r.oid), '')
   FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND (r.prrelid = c.oid
     OR r.prrelid IN (SELECT a.relid FROM pg_partition_ancestors(c.oid) a))
   WHERE p.pubname = %(publication)s AND EXISTS (
     SELECT 1 FROM pg_publication_tables t
     WHERE t.pubname = p.pubname AND t.schemaname = n.nspname AND t.tablename = c.relname)
   GROUP BY p.oid),
  (SELECT min(leaf.oid::regclass::text) FROM pg_partition_tree(c.oid) t
   JOIN pg_class leaf ON leaf.oid = t.relid
   WHERE k.indexrelid IS NOT NULL AND leaf.relkind = 'r' AND leaf.relreplident <> 'f'
     AND c.relkind = 'p' AND NOT EXISTS (
       SELECT 1 FROM pg_partition_tree(k.indexrelid) x JOIN pg_index i ON i.indexrelid = x.relid
       WHERE i.indrelid = leaf.oid
         AND CASE leaf.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END)),
  (SELECT to_jsonb(t) FROM pg_publication_tables t
   WHERE t.pubname = %(publication)s AND t.schemaname = n.nspname AND t.tablename = c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_index k ON k.indrelid = c.oid AND k.indisvalid AND k.indimmediate
  AND CASE c.relreplident WHEN 'i' THEN k.indisreplident ELSE k.indisprimary END
WHERE c.oid = CASE WHEN %(schema)s::text IS NULL THEN to_regclass(quote_ident(%(name)s))::oid ELSE (
  SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = %(schema)s AND c.relname = %(name)s) END
"""
# Generated columns are in the stream from PostgreSQL 18 on, if they are stored. The last columns:
# whether a value of the type (array, composite, range, interval, jsonb) may be another one, or no
# key of a dict, once it was a Python value; and the transaction that has altered the column.
_COLUMNS = """
SELECT a.attname::text, a.atttypid, format_type(a.atttypid, a.atttypmod),
  CASE WHEN o.oid <> 100 THEN quote_ident(n.nspname) || '.' || quote_ident(o.collname) END,
  array_position((string_to_array(i.indkey::text, ' '))[1:i.indnkeyatts], a.attnum::text),
  t.typcategory IN ('A', 'C', 'R', 'T') OR 'jsonb'::regtype IN (t.oid, t.typbasetype),
  a.xmin::text
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_index i ON i.indexrelid = %(key)s
LEFT JOIN pg_collation o ON o.oid = a.attcollation
LEFT JOIN pg_namespace n ON n.oid = o.collnamespace
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
  AND (a.attgenerated = ''
    OR a.attgenerated = 's' AND current_setting('server_version_num')::int >= 180000)
ORDER BY a.attnum
"""
# Those that hold a lock for writing: a commit keeps its locks until snapshots see it.
_WRITERS = """
SELECT DISTINCT t.transactionid::text::bigint
FROM pg_locks r JOIN pg_locks t ON t.virtualtransaction = r.virtualtransaction
WHERE r.locktype = 'relation' AND r.granted
  AND r.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                 'AccessExclusiveLock')
  AND r.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND r.relation IN (SELECT %(oid)s::oid UNION SELECT p.relid FROM pg_partition_tree(%(oid)s) p)
  AND t.locktype = 'transactionid' AND t.mode = 'ExclusiveLock' AND t.granted
"""
_INTEGERS, _UUID = (20, 21, 23), 2950

_DUMPERS = Transformer()
#: What a list of keys is called in a query, and the number of a key: nothing else has these names.
_LISTED, _NUMBER = "moored keys", sql.Identifier("moored number")

#: The values of a key as a change has them.
KeyValues = tuple[Any, ...]


class ColumnsChanged(PostgresError):
    """The columns of a table are others than those of its copy, which must begin again."""


class KeyColumn(NamedTuple):
    """A column of the key."""

    name: str
    type_oid: int
    #: The type, and the collation unless it is the default, as SQL.
    cast: str
    #: Whether its values cannot be compared with those of changes.
    opaque: bool

    @property
    def parser(self) -> Any:
        """The type whose order in Python equals the server's; None if there is none."""
        return int if self.type_oid in _INTEGERS else UUID if self.type_oid == _UUID else None


class SourceTable(NamedTuple):
    """A table as the catalog describes it."""

    oid: int
    schema: str
    name: str
    #: The number of rows, by the statistics.
    estimated: int
    #: The names of the columns to copy.
    columns: tuple[str, ...]
    #: The columns of the primary key, or of the replica identity; empty without one.
    key: tuple[KeyColumn, ...]
    #: Returns the values of the key's columns in a row.
    key_values: Callable[[Row], KeyValues]
    where: str | None
    #: Whether its rows are in partitions.
    partitioned: bool
    version: CopyVersion
    #: The value of MARKER.
    marker: str
    #: Why its changes cannot be joined with its rows; None if they can.
    problem: str | None

    @property
    def qualified(self) -> str:
        """The name with its schema."""
        return f"{self.schema}.{self.name}"

    @property
    def rows(self) -> sql.Composed:
        """The table as SQL, without tables that inherit from it: their changes are their own."""
        only = "" if self.partitioned else "ONLY "
        return sql.SQL(only + "{}").format(sql.Identifier(self.schema, self.name))

    def select(self, after: Key | None, through: Key | None) -> sql.Composed:
        """Return the query of the rows of a range of keys."""
        conditions: list[sql.Composable] = []
        if after is not None:
            conditions.append(sql.SQL("{} > {}").format(self._key(), self._values(after)))
        if through is not None:
            conditions.append(sql.SQL("{} <= {}").format(self._key(), self._values(through)))
        return self._select(conditions)

    def select_keys(self, keys: Sequence[KeyValues]) -> sql.Composed:
        """Return the query of the rows with these keys, each after the number of its key."""
        row = self._select([sql.SQL("{} = {}").format(self._key(), self._key(_LISTED))])
        return sql.SQL("SELECT {}, found.* FROM {}, LATERAL ({}) AS found").format(
            _NUMBER, self._listed(keys, _LISTED), row
        )

    def _select(self, conditions: list[sql.Composable]) -> sql.Composed:
        if self.where is not None:
            conditions.append(sql.SQL(f"({self.where}\n)"))  # it may end with a comment
        return sql.SQL("SELECT {} FROM {}{}").format(
            sql.SQL(", ").join(map(sql.Identifier, self.columns)),
            self.rows,
            sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions) if conditions else sql.SQL(""),
        )

    def bound(self, after: Key | None, rows: int) -> sql.Composed:
        """Return the query of the last key of the next chunk; it finds none in the last chunk."""
        names = [sql.Identifier(column.name) for column in self.key]
        # Outside of the subquery, the strings are made for one row only.
        return sql.SQL("SELECT {} FROM (SELECT {} FROM {} OFFSET {} LIMIT 1) AS last").format(
            sql.SQL(", ").join(sql.SQL("{}::text").format(name) for name in names),
            sql.SQL(", ").join(names),
            self._following(after),
            sql.Literal(rows - 1),
        )

    def size(self, after: Key | None, rows: int) -> sql.Composed:
        """Return the query of the average size of the next rows as text, in bytes."""
        return sql.SQL(
            "SELECT avg(octet_length((next.*)::text))::bigint "
            "FROM (SELECT {} FROM {} LIMIT {}) AS next"
        ).format(
            sql.SQL(", ").join(map(sql.Identifier, self.columns)),
            self._following(after),
            sql.Literal(rows),
        )

    def _following(self, after: Key | None) -> sql.Composed:
        """Return the rows after a key, in the order of the key, as SQL after FROM."""
        found = sql.SQL("{}").format(self.rows)
        if after is not None:
            found += sql.SQL(" WHERE {} > {}").format(self._key(), self._values(after))
        if self.key:
            names = sql.SQL(", ").join(sql.Identifier(column.name) for column in self.key)
            found += sql.SQL(" ORDER BY {}").format(names)
        return found

    def place(self, bounds: Sequence[Key], keys: Sequence[KeyValues]) -> list[int] | None:
        """Return how many bounds are less than each key; None if only the server can tell."""
        parsers = [column.parser for column in self.key]
        if not self.key:
            return [0] * len(keys)
        if None in parsers:
            return None
        parsed = [tuple(p(text) for p, text in zip(parsers, b, strict=True)) for b in bounds]
        return [bisect_left(parsed, key) for key in keys]

    def place_by_server(self, bounds: Sequence[Key], keys: Sequence[KeyValues]) -> sql.Composed:
        """Return the query of `place`."""
        return sql.SQL(
            "SELECT (SELECT count(*) FROM {} WHERE {} < {})::int FROM {} ORDER BY k.{}"
        ).format(
            self._listed(bounds, "b"),
            self._key("b"),
            self._key("k"),
            self._listed(keys, "k"),
            _NUMBER,
        )

    def _listed(self, keys: Sequence[KeyValues], alias: str) -> sql.Composed:
        """Return keys as a table with the columns of the key and a number, from 1 on."""
        names = [sql.Identifier(column.name) for column in self.key]
        # One array for each column: an expression for each key would take many times as long.
        arrays = [
            sql.SQL("{}::text[]").format(sql.Literal(_array(values)))
            for values in zip(*keys, strict=True)
        ]
        cast = [
            sql.SQL("{}::" + column.cast + " AS {}").format(name, name)
            for name, column in zip(names, self.key, strict=True)
        ]
        return sql.SQL("(SELECT {}, {} FROM unnest({}) WITH ORDINALITY AS u ({})) AS {}").format(
            sql.SQL(", ").join(cast),
            _NUMBER,
            sql.SQL(", ").join(arrays),
            sql.SQL(", ").join([*names, _NUMBER]),
            sql.Identifier(alias),
        )

    def key_of(self, row: Row, before: Row | None = None) -> KeyValues:
        """Return the key of a row; of an unchanged large value, from the row before the change."""
        try:
            key = self.key_values(row)
            if UNCHANGED in key and before is not None:
                key = tuple(
                    before[column.name] if value is UNCHANGED else value
                    for column, value in zip(self.key, key, strict=True)
                )
        except KeyError as missing:
            raise ColumnsChanged(
                f"a change of {self.qualified} lacks the column {missing} of its key: the column "
                "was renamed, or the table has got another replica identity"
            ) from None
        if None in key:
            raise ColumnsChanged(
                f"a change of {self.qualified} lacks its key: a partition has another replica "
                "identity than the table"
            )
        return key

    def _key(self, alias: str | None = None) -> sql.Composed:
        names = [
            sql.Identifier(column.name) if alias is None else sql.Identifier(alias, column.name)
            for column in self.key
        ]
        return sql.SQL("({})").format(sql.SQL(", ").join(names))

    def _values(self, key: KeyValues) -> sql.Composed:
        values = [
            # A string, because -1::smallint is -(1::smallint).
            sql.SQL("{}::" + column.cast).format(
                sql.Literal(str(value) if isinstance(value, int) else value)
            )
            for column, value in zip(self.key, key, strict=True)
        ]
        return sql.SQL("({})").format(sql.SQL(", ").join(values))


async def describe_table(
    conn: psycopg.AsyncConnection[Any],
    name: str,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    publication: str = "",
) -> SourceTable:
    """Describe a table; raise `ConfigurationError` if it cannot be copied as requested."""
    parsed = parse_table(name)
    names = {"schema": parsed.schema, "name": parsed.name, "publication": publication}
    found = await conn.execute(_TABLE, names)
    row = await found.fetchone()
    if row is None:
        raise ConfigurationError(
            f"the table {name} does not exist, or this role may not use its schema"
        )
    oid, schema, plain, kind, standby, estimated, index, published, leaf, entry = row
    if standby:
        raise ConfigurationError(
            "snapshots need the primary server, and database_url leads to a standby"
        )
    if kind not in "rp":
        raise ConfigurationError(f"{schema}.{plain} is not a table: only tables can be copied")
    found = await conn.execute(f"SELECT {MARKER}", {"oid": oid})
    (marker,) = await found.fetchone() or ("",)
    listed = await (await conn.execute(_COLUMNS, {"oid": oid, "key": index})).fetchall()
    if unknown := set(columns or ()) - {each[0] for each in listed}:
        raise ConfigurationError(
            f"columns: {schema}.{plain} has no column {', '.join(sorted(unknown))}"
        )
    places = {
        place: KeyColumn(
            name, type_oid, cast if collation is None else f"{cast} COLLATE {collation}", opaque
        )
        for name, type_oid, cast, collation, place, opaque, _ in listed
        if place is not None
    }
    key = tuple(places[place] for place in sorted(places))
    chosen = {each[0] for each in listed} if columns is None else {*columns}
    chosen |= {each.name for each in key}
    copied = tuple(each[0] for each in listed if each[0] in chosen)
    if where is not None and not key:
        raise ConfigurationError(f"where: {schema}.{plain} needs a primary key for it: add one")
    return SourceTable(
        oid=oid,
        schema=schema,
        name=plain,
        estimated=estimated,
        columns=copied,
        key=key,
        key_values=_getter([column.name for column in key]),
        where=where,
        partitioned=kind == "p",
        version=CopyVersion(
            # Without `columns`, a column that is added to a complete copy is in its changes.
            _digest([oid, where, None if columns is None else sorted(chosen)]),
            _digest(listed),
            "" if published is None else _digest(published),
        ),
        marker=marker,
        problem=_problem(f"{schema}.{plain}", key, leaf)
        or _filtered(f"{schema}.{plain}", entry or {}, copied if where is None else ()),
    )


def _getter(names: list[str]) -> Callable[[Row], KeyValues]:
    """Return what returns these columns of a row."""
    if len(names) == 1:
        (name,) = names
        return lambda row: (row[name],)
    return itemgetter(*names) if names else lambda _: ()


def _problem(name: str, key: Sequence[KeyColumn], leaf: str | None) -> str | None:
    """Return why a table cannot be followed.

    :param leaf: a partition with another replica identity than the table.
    """
    if opaque := [each for each in key if each.opaque]:
        return (
            f"{name} cannot be followed by its key: values of {opaque[0].name} "
            f"({opaque[0].cast}) cannot be compared outside of the server; set REPLICA "
            "IDENTITY to an index of other columns"
        )
    if leaf is not None:
        return (
            f"{name} cannot be followed by its key: its partition {leaf} has another replica "
            f"identity, so its changes lack the key; run ALTER TABLE {leaf} REPLICA IDENTITY FULL"
        )
    return None


def _filtered(name: str, entry: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Return what is missing in the changes of a table, by its row of pg_publication_tables.

    :param columns: those that the changes must have.
    """
    # PostgreSQL 14 has neither of the two columns.
    if entry.get("rowfilter") is not None:
        return (
            f"{name} is published with a row filter, so changes of its other rows are missing: "
            "`moored doctor URL` prints the statements that remove it (publication_filters)"
        )
    if lost := [each for each in columns if each not in entry.get("attnames", columns)]:
        return (
            f"the publication leaves out columns of {name} ({', '.join(lost)}): name the other "
            "ones in columns=, or publish these (`moored doctor URL`: publication_filters; for "
            "generated columns, set publish_generated_columns = stored)"
        )
    return None


def _array(values: Sequence[Any]) -> str:
    """Return values of a key as the text of an array of strings."""
    if all(type(value) is int for value in values):
        return "{" + ",".join(map(str, values)) + "}"
    quoted = (_text(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return '{"' + '","'.join(quoted) + '"}'


def _text(value: Any) -> str:
    """Return a value as the server reads it."""
    if isinstance(value, str):
        return value
    dumped = _DUMPERS.get_dumper(value, PyFormat.TEXT).dump(value)
    return "" if dumped is None else bytes(dumped).decode()


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


async def writers(conn: psycopg.AsyncConnection[Any], table: SourceTable) -> set[int]:
    """Return the transactions that have written to a table and that snapshots may not see yet."""
    found = await conn.execute(_WRITERS, {"oid": table.oid})
    return {xid for (xid,) in await found.fetchall()}
