"""Checks of privileges, of the publication, and of the tables that are or should be published."""

from __future__ import annotations

from ._check import Check, Severity

# The tables that should be followed, and those that are published.
_TABLES = """
WITH named AS (
  SELECT concat_ws('.', w.schema, w.name) AS name, c.oid
  FROM unnest(%(schemas)s::text[], %(names)s::text[]) AS w (schema, name)
  LEFT JOIN pg_class c ON c.relname = w.name AND CASE WHEN w.schema IS NULL
    -- A schema that the role may not use hides its tables.
    THEN pg_table_is_visible(c.oid) OR NOT has_schema_privilege(relnamespace, 'USAGE')
      AND relnamespace::regnamespace::text = ANY (
        regexp_split_to_array(current_setting('search_path'), ', *'))
    ELSE relnamespace::regnamespace::text = quote_ident(schema) END
), published AS (
  SELECT c.oid FROM pg_publication_tables JOIN pg_class c ON c.relname = tablename
    AND c.relnamespace::regnamespace::text = quote_ident(schemaname)
  WHERE pubname = %(publication)s
), tables AS (
  SELECT *, relnamespace::regnamespace || '.' || quote_ident(relname) AS shown,
    oid IN (SELECT oid FROM published) AS is_published
  FROM pg_class WHERE oid IN (SELECT oid FROM named UNION SELECT oid FROM published)
)
"""
_PUBLICATION = "(SELECT 1 FROM pg_publication WHERE pubname = %(publication)s)"


class ReplicationPrivilege(Check):
    """A role without REPLICATION."""

    query = """SELECT format(CASE WHEN rds.oid IS NULL THEN 'ALTER ROLE %%I REPLICATION'
                         ELSE 'GRANT rds_replication TO %%I' END, r.rolname) AS statement
      FROM pg_roles r LEFT JOIN pg_roles rds ON rds.rolname = 'rds_replication'
      WHERE r.rolname = current_user AND NOT (r.rolsuper OR r.rolreplication)
        AND NOT coalesce(pg_has_role(rds.oid, 'MEMBER'), false)"""
    problem = "the role {user} may not replicate"
    statements = ("{statement}",)


class CreatePrivilege(Check):
    """No publication, and a role that may not create it."""

    query = f"""SELECT WHERE NOT has_database_privilege(current_database(), 'CREATE')
      AND NOT EXISTS {_PUBLICATION}"""
    problem = "there is no publication {publication}, and the role {user} may not create it"
    statements = ("GRANT CREATE ON DATABASE {database} TO {user}",)
    advice = "or create the publication, and set manual_publication=True"


class PublicationOwner(Check):
    """A publication of another role: no tables can be added to it."""

    severity = Severity.WARNS
    query = """SELECT pg_get_userbyid(pubowner) AS owner FROM pg_publication
      WHERE pubname = %(publication)s AND NOT puballtables AND NOT pg_has_role(pubowner, 'USAGE')"""
    problem = "the publication {publication} belongs to {owner}: {user} cannot add tables to it"
    statements = ("ALTER PUBLICATION {publication} OWNER TO {user}",)
    advice = "or set manual_publication=True, and add tables as its owner"


class PublicationOperations(Check):
    """A publication that leaves out inserts, updates, deletes or truncates."""

    severity = Severity.WARNS
    query = """SELECT FROM pg_publication WHERE pubname = %(publication)s
        AND NOT (pubinsert AND pubupdate AND pubdelete AND pubtruncate)"""
    problem = "the publication {publication} leaves out some kinds of changes"
    statements = (
        "ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')",
    )


class PublicationFilters(Check):
    """A table that is published with a row filter or a column list: consumers miss the rest."""

    severity = Severity.WARNS
    # PostgreSQL 14 has neither of the two columns.
    query = """SELECT relnamespace::regnamespace || '.' || quote_ident(relname) AS table,
        CASE WHEN r ->> 'prqual' IS NULL THEN 'column list' ELSE 'row filter' END AS what
      FROM (SELECT to_jsonb(r) FROM pg_publication_rel r) AS rel (r)
      JOIN pg_publication p ON p.oid = (r ->> 'prpubid')::oid
      JOIN pg_class c ON c.oid = (r ->> 'prrelid')::oid
      WHERE pubname = %(publication)s AND coalesce(r ->> 'prqual', r ->> 'prattrs') IS NOT NULL"""
    problem = "{table} is published with a {what}: consumers do not get the rest"
    statements = (
        "ALTER PUBLICATION {publication} DROP TABLE ONLY {table}; "
        "ALTER PUBLICATION {publication} ADD TABLE ONLY {table}",
    )
    advice = "consumers of the table get a Reset"


class NamedTables(Check):
    """A table that cannot be published: it does not exist, is a view, or is not logged."""

    query = f"""{_TABLES}
      SELECT named.name AS table, CASE WHEN relkind = 'r' AND relpersistence = 'u'
        THEN format('ALTER TABLE %%s SET LOGGED', shown) ELSE '' END AS statement
      FROM named LEFT JOIN tables USING (oid)
      WHERE (relkind IN ('r', 'p') AND relpersistence = 'p') IS NOT TRUE"""
    problem = "{table} does not exist, or is not an ordinary table whose changes are logged"
    statements = ("{statement}",)
    advice = "check its name and schema"


class TableOwner(Check):
    """A table that is not published, and that the role cannot publish because it is not its own."""

    query = f"""{_TABLES}
      SELECT string_agg(shown, ', ' ORDER BY shown) AS tables,
        string_agg('ONLY ' || shown, ', ' ORDER BY shown) AS listed,
        format(CASE WHEN EXISTS {_PUBLICATION} THEN 'ALTER PUBLICATION %%I ADD'
                    ELSE 'CREATE PUBLICATION %%I FOR' END, %(publication)s) AS publish
      FROM tables WHERE NOT (is_published OR pg_has_role(relowner, 'USAGE')) HAVING count(*) > 0"""
    problem = "the role {user} cannot publish {tables}, which it does not own"
    statements = ("{publish} TABLE {listed}",)
    advice = "or make the role a member of the owning role"


class SelectPrivilege(Check):
    """A table whose rows the role may not read: its changes can be followed, but not its rows."""

    purpose = "database_url"
    query = f"""{_TABLES}
      SELECT shown AS table,
        CASE WHEN oid IN (SELECT oid FROM named) THEN 'stops' ELSE 'warns' END AS severity,
        CASE WHEN has_schema_privilege(relnamespace, 'USAGE') THEN '' ELSE format(
          'GRANT USAGE ON SCHEMA %%s TO %%I', relnamespace::regnamespace, current_user) END AS usage
      FROM tables WHERE NOT (
        has_table_privilege(oid, 'SELECT') AND has_schema_privilege(relnamespace, 'USAGE'))
      ORDER BY shown"""
    problem = "the role {user} may not read {table}: it cannot be copied"
    statements = ("{usage}", "GRANT SELECT ON {table} TO {user}")


class RowSecurity(Check):
    """A table with row-level security that the role does not bypass: it cannot be copied."""

    purpose = "database_url"
    query = f"""{_TABLES}
      SELECT shown AS table,
        CASE WHEN oid IN (SELECT oid FROM named) THEN 'stops' ELSE 'warns' END AS severity
      FROM tables WHERE row_security_active(oid) ORDER BY shown"""
    problem = "row-level security may hide rows of {table} from {user}: it cannot be copied"
    statements = ("ALTER ROLE {user} BYPASSRLS",)
    advice = "or, if the role owns the table, ALTER TABLE … NO FORCE ROW LEVEL SECURITY"


class TableIdentity(Check):
    """A table without a replica identity, or with REPLICA IDENTITY FULL beside a primary key."""

    # A partition has a replica identity of its own.
    query = f"""{_TABLES}
      SELECT relnamespace::regnamespace || '.' || quote_ident(relname) AS table, what,
        CASE WHEN has_key THEN 'DEFAULT' ELSE 'FULL' END AS identity,
        CASE WHEN is_published AND relreplident <> 'f' THEN 'warns' ELSE 'notes' END AS severity
      FROM (SELECT oid AS root, is_published FROM tables) AS t CROSS JOIN pg_class leaf, LATERAL (
        SELECT coalesce(bool_or(indisprimary AND indimmediate), false) AS has_key,
          coalesce(bool_or(indisreplident), false) AS has_identity
        FROM pg_index WHERE indrelid = leaf.oid AND indisvalid) AS i, LATERAL (VALUES
        ('f', has_key, 'a primary key and REPLICA IDENTITY FULL: an update writes the whole old row'
          ' to the WAL, which only consumers of old values need'),
        ('d', NOT has_key, 'no primary key: UPDATE and DELETE are refused while it is published'),
        ('n', true, 'REPLICA IDENTITY NOTHING: UPDATE and DELETE are refused while published'),
        ('i', NOT has_identity, 'lost the index of its REPLICA IDENTITY: UPDATE is refused')
      ) AS cases (identity, is_wrong, what)
      WHERE relkind = 'r' AND relreplident = cases.identity::"char" AND is_wrong
        AND leaf.oid IN (SELECT root UNION SELECT relid FROM pg_partition_tree(root))
      ORDER BY 1"""
    problem = "{table} has {what}"
    statements = ("ALTER TABLE {table} REPLICA IDENTITY {identity}",)
    advice = "Moored sets FULL by itself when it publishes a table without a replica identity"
