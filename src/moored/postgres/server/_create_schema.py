"""The statements that create the schema of Moored's tables."""

from typing import LiteralString

__all__ = ["CREATE_SCHEMA"]

#: "if not exists" raises if another session creates the schema at the same time: another process
#: that starts, for its outbox, its parked items or its leases, which take this lock, too.
#: A session that has looked for the schema before learns of it when it opens a table.
CREATE_SCHEMA: LiteralString = """
select pg_advisory_xact_lock(hashtextextended('moored.schema', 0));
select from pg_namespace limit 0;
create schema if not exists {schema};
"""
