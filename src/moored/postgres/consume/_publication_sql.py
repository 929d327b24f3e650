"""The SQL of publications: the catalog query, and the statements that publish tables."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from ._tables import Table

__all__ = [
    "CATALOG",
    "ENTRIES",
    "MISSING",
    "UNCOMPILED",
    "by_hand",
    "full_identity",
    "lock_mode",
    "marker",
    "options_for",
]

#: The first version whose publications may have schemas.
SCHEMAS = 150000

#: The queries of the catalog are estimated to be expensive, so the server would compile them, which
#: takes seconds; the queries take milliseconds.
UNCOMPILED = "SET LOCAL jit = off"

#: The publication or the slot, if it does not exist.
MISSING = """
SELECT format('publication "%%s"', %(publication)s::text)
WHERE NOT EXISTS (SELECT 1 FROM pg_publication WHERE pubname = %(publication)s)
UNION ALL
SELECT format('replication slot "%%s"', %(slot)s::text)
WHERE NOT EXISTS (SELECT 1 FROM pg_replication_slots WHERE slot_name = %(slot)s)
"""

_WANTED = """wanted AS (
  SELECT w.wanted, CASE WHEN w.schema IS NULL THEN to_regclass(quote_ident(w.name))::oid ELSE (
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = w.schema AND c.relname = w.name) END AS oid
  FROM unnest(%(wanted)s::text[], %(schemas)s::text[], %(names)s::text[])
    AS w (wanted, schema, name)
)"""

#: The named tables, and optionally all published ones, in the order in which they are locked.
CATALOG = f"""
WITH {_WANTED},
published AS (
  SELECT quote_ident(t.schemaname) || '.' || quote_ident(t.tablename) AS wanted, c.oid
  FROM pg_publication_tables t
  JOIN pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  WHERE t.pubname = %(publication)s
),
looked AS (
  SELECT wanted, oid FROM wanted UNION SELECT wanted, oid FROM published WHERE %(everything)s
)
SELECT l.wanted, c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
  EXISTS (SELECT 1 FROM published WHERE published.oid = c.oid),
  coalesce((
    SELECT r.oid FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = c.oid), 0),
  ARRAY(
    SELECT leaf.oid::regclass::text FROM pg_class leaf
    WHERE leaf.relkind = 'r' AND leaf.relreplident <> 'f'
      AND leaf.oid IN (SELECT c.oid UNION SELECT t.relid FROM pg_partition_tree(c.oid) t)
      AND NOT EXISTS (
        SELECT 1 FROM pg_index i
        WHERE i.indrelid = leaf.oid AND i.indisvalid AND i.indimmediate
          AND CASE leaf.relreplident WHEN 'd' THEN i.indisprimary
                                     WHEN 'i' THEN i.indisreplident ELSE false END)
    ORDER BY 1),
  coalesce((
    SELECT string_agg(r.oid::text, ',' ORDER BY r.oid) FROM pg_publication_rel r
    WHERE r.prpubid = p.oid AND (r.prrelid = c.oid OR r.prrelid IN (
      SELECT a.relid FROM pg_partition_ancestors(c.oid) a))), ''),
  coalesce(p.oid || '/' || p.xmin, ''),
  coalesce(p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate, false),
  coalesce(p.pubviaroot, false),
  (SELECT coalesce(json_object_agg(a.attnum, json_build_array(a.attname, a.atttypid::bigint,
      CASE a.atttypid WHEN 'numeric'::regtype THEN a.atttypmod ELSE -1 END,
      a.atthasdef OR a.atthasmissing OR a.attidentity <> '',
      format_type(a.atttypid, a.atttypmod))), '{{}}')
   FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
  (SELECT coalesce(json_object_agg(t.relid::oid || '/' || i.xmin, json_build_array(
      -- ATTACH PARTITION has written its columns with the same command, PARTITION OF before.
      t.relid::text, EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = t.relid
        AND a.attnum > 0 AND a.xmin = i.xmin AND a.cmin = i.cmin)
      AND (SELECT sum(pg_relation_size(s.relid)) > 0 FROM pg_partition_tree(t.relid) s))), '{{}}')
   FROM pg_partition_tree(c.oid) t JOIN pg_inherits i ON i.inhrelid = t.relid
   WHERE t.relid <> c.oid),
  pg_current_wal_insert_lsn()::text
FROM looked l
JOIN pg_class c ON c.oid = l.oid
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication p ON p.pubname = %(publication)s
ORDER BY n.nspname, c.relname
"""
#: The tables of entries of a publication.
ENTRIES = """
SELECT n.nspname::text, c.relname::text
FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %(publication)s AND r.oid = ANY (%(entries)s)
ORDER BY 1, 2
"""
# A number that is another one after a change of the catalog of which `CATALOG` may tell. It reads
# rows of the catalog only, so it waits for no lock, not even of a long ALTER TABLE.
_MARKER = f"""
WITH RECURSIVE publication AS (
  SELECT oid, xmin, puballtables FROM pg_publication WHERE pubname = %(publication)s
),
{_WANTED},
tree (oid) AS (
  SELECT oid FROM wanted
  UNION SELECT r.prrelid FROM pg_publication_rel r JOIN publication p ON p.oid = r.prpubid
  UNION SELECT c.oid FROM pg_class c JOIN publication p ON p.puballtables
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
  {{schemas}}
  UNION SELECT i.inhrelid FROM tree t JOIN pg_inherits i ON i.inhparent = t.oid
)
SELECT hashtextextended(concat_ws(' ',
  (SELECT p.oid || '/' || p.xmin FROM publication p),
  (SELECT string_agg(r.oid || '/' || r.xmin, ',' ORDER BY r.oid)
   FROM pg_publication_rel r JOIN publication p ON p.oid = r.prpubid),
  (SELECT string_agg(w.wanted || '/' || w.oid, ',' ORDER BY w.wanted) FROM wanted w),
  (SELECT string_agg(concat_ws('/', c.oid, c.xmin, n.nspname), ',' ORDER BY c.oid)
   FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace),
  (SELECT string_agg(concat_ws('/', a.attrelid, a.attnum, a.xmin), ','
     ORDER BY a.attrelid, a.attnum)
   FROM tree t JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0)), 0)
"""
_SCHEMAS = """UNION SELECT c.oid FROM pg_publication_namespace s
    JOIN publication p ON p.oid = s.pnpubid JOIN pg_class c ON c.relnamespace = s.pnnspid
    WHERE c.relkind IN ('r', 'p')"""
_EVERYTHING = "publish = 'insert, update, delete, truncate'"
_VIA_ROOT = "publish_via_partition_root = true"


def marker(version: int) -> str:
    """Return the query of the marker, for a version of the server."""
    return _MARKER.format(schemas=_SCHEMAS if version >= SCHEMAS else "")


def options_for(tables: Sequence[Table]) -> list[str]:
    """Return the options that a publication of these tables lacks."""
    options = []
    if any(each.kind == "p" and not each.via_root for each in tables):
        # Otherwise its changes are published under the names of its partitions.
        options.append(_VIA_ROOT)
    if not all(each.complete for each in tables):
        options.append(_EVERYTHING)
    return options


def lock_mode(keyless: Sequence[str]) -> str:
    """Return the lock for publishing tables, some of which may lack a replica identity.

    It keeps out writers, and other publishers: ALTER PUBLICATION takes a lock that conflicts with
    SHARE, so two publishers that hold SHARE would deadlock. To set a replica identity takes the
    strongest lock.
    """
    return "ACCESS EXCLUSIVE" if keyless else "SHARE ROW EXCLUSIVE"


def full_identity(table: str) -> str:
    """Return the statement that gives a table a replica identity."""
    return f"ALTER TABLE {table} REPLICA IDENTITY FULL"


def by_hand(publication: str, tables: Sequence[Table]) -> str:
    """Return the statements that publish tables, for the owner of tables and publication."""
    altered = f"ALTER PUBLICATION {sql.Identifier(publication).as_string(None)}"
    added = ", ".join(table.quoted for table in tables if table.is_new)
    keyless = [leaf for table in tables if table.is_new for leaf in table.keyless]
    options = options_for(tables)
    statements = [f"{altered} SET ({', '.join(options)})"] if options else []
    if added:
        # Without the lock, what running transactions have written would be missing.
        lock = f"BEGIN; LOCK TABLE {added} IN {lock_mode(keyless)} MODE"
        add = f"{altered} ADD TABLE {added}"
        statements = [lock, *statements, add, *map(full_identity, keyless), "COMMIT"]
    return "; ".join(statements)
