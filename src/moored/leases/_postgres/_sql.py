"""The tables of the Postgres store, and its statements.

Each call is one message with several statements. Postgres runs them as one transaction, each with a
snapshot of its own. So the count after a lock sees what the lock waited for, in one round trip, and
no state is left in the session: this works with PgBouncer's transaction pooling, and a client that
is suspended or disconnected never holds a lock.
"""

from __future__ import annotations

from typing import LiteralString

from psycopg import sql

__all__ = ["TABLES", "Statements", "ddl", "grants"]

#: How long the fence of an unused key is kept; after that the server's clock makes the next one
#: greater.
_FENCE_KEPT = "7 days"

TABLES = ("leases", "fences", "rates", "guards")

# "if not exists" raises if another session creates the schema at the same time: for an outbox, say.
# A session that has looked for the schema before learns of it when it opens a table.
_SCHEMA = """\
select pg_advisory_xact_lock(hashtextextended('moored.schema', 0));
select from pg_namespace limit 0;
create schema if not exists {schema};
"""
_DDL = """\
create table if not exists {schema}.leases (
    key text not null,
    id text not null,
    fence bigint not null,
    expires timestamptz not null,
    ttl interval not null,
    service_name text not null,
    owner text not null,
    host text not null,
    pid bigint not null,
    created timestamptz not null,
    primary key (key, id)
);
create table if not exists {schema}.fences (
    key text primary key,
    fence bigint not null,
    given timestamptz not null
);
create index if not exists fences_given on {schema}.fences (given);
create table if not exists {schema}.rates (
    key text primary key,
    full_at bigint not null,
    asked_at bigint not null,
    granted bigint not null
) with (fillfactor = 50);
create table if not exists {schema}.guards (
    resource text primary key,
    fence bigint not null
);"""

_TRANSACTION_SETTINGS = """
set transaction isolation level read committed;
select set_config('statement_timeout', %(timeout_ms)s, true);
"""

_MICROS = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"

# The lock lets one acquire of a key run at a time. Expired leases are deleted first, which waits
# for renewals in flight; then every row that is left counts, even if it expires meanwhile.
#
# A lease with more than its own ttl left was granted before the server's clock was set back. Its
# expiry is set to its ttl from now; otherwise it would stay for as long as the clock was set back.
#
# A fence is the time in microseconds, or the last fence plus one if that is greater. So it grows
# even if the last fence was lost: by a failover, a restore, or because the key was unused for long.
_ACQUIRE = """
select pg_advisory_xact_lock(hashtextextended({lock} || %(key)s, 0));
delete from {schema}.leases where (key, id) in (
    select key, id from {schema}.leases
    where key = %(key)s and expires <= clock_timestamp() order by id for update
);
update {schema}.leases set expires = clock_timestamp() + ttl
    where key = %(key)s and expires > clock_timestamp() + ttl;
with mine as (
    update {schema}.leases
    set expires = greatest(expires, clock_timestamp() + %(ttl)s * interval '1 second')
    where key = %(key)s and id = %(id)s
    returning fence
), next as (
    insert into {schema}.fences as f (key, fence, given)
    select %(key)s, {micros}, clock_timestamp()
    where not exists (select from mine)
    and (select count(*) from {schema}.leases where key = %(key)s) < %(limit)s
    on conflict (key) do update
    set fence = greatest(f.fence + 1, excluded.fence), given = excluded.given
    returning fence
), given as (
    insert into {schema}.leases
        (key, id, fence, expires, ttl, service_name, owner, host, pid, created)
    select %(key)s, %(id)s, fence, clock_timestamp() + %(ttl)s * interval '1 second',
        %(ttl)s * interval '1 second', %(service_name)s, %(owner)s, %(host)s, %(pid)s,
        clock_timestamp()
    from next
    returning fence
)
select fence from mine union all select fence from given;
"""

# Rows are locked in the same order by every statement, so that two of them cannot deadlock. A lease
# that an acquire deletes meanwhile is not found, and so not renewed.
_RENEW = """
with asked as (
    select distinct on (key, id) key, id, ttl
    from unnest(%(keys)s::text[], %(ids)s::text[], %(ttls)s::float8[]) as a (key, id, ttl)
    order by key, id
), alive as (
    select l.key, l.id, a.ttl
    from {schema}.leases l join asked a on l.key = a.key and l.id = a.id
    where l.expires > clock_timestamp()
    order by l.key, l.id for update of l
)
update {schema}.leases l
set expires = clock_timestamp() + a.ttl * interval '1 second', ttl = a.ttl * interval '1 second'
from alive a where l.key = a.key and l.id = a.id
returning l.key, l.id;
"""

_RELEASE = """
with asked as (
    select distinct key, id from unnest(%(keys)s::text[], %(ids)s::text[]) as a (key, id)
), found as (
    select l.key, l.id
    from {schema}.leases l join asked a on l.key = a.key and l.id = a.id
    order by l.key, l.id for update of l
), ended as (
    delete from {schema}.leases l using found f where l.key = f.key and l.id = f.id
    returning l.key, l.id, l.expires > clock_timestamp() as lived
)
select key, id from ended where lived;
"""

# `full_at` is the microsecond at which the limit is full again. It lies between now (full) and
# `depth` ahead (empty). If it is further ahead, the clock was set back or the limit was lowered:
# the limit then counts as empty now, which never grants too much and does not block for long.
# Therefore `now` must be read while the row is locked: a time from before the wait for the lock is
# older than changes by other clients meanwhile, which would look like a clock that was set back.
# Costs are rounded up and compared as integers, so that rounding never grants an extra token.
_TAKE = """
with ask as materialized (
    select {micros} as begun, %(rate)s::float8 as rate, %(burst)s::bigint as burst,
        %(tokens)s::bigint as tokens, ceil(%(burst)s * 1000000 / %(rate)s::float8)::bigint as depth
), taken as (
    insert into {schema}.rates as r (key, full_at, asked_at, granted)
    select %(key)s, begun + ceil(least(tokens, burst) * 1000000 / rate)::bigint, begun,
        least(tokens, burst)
    from ask
    on conflict (key) do update set (full_at, asked_at, granted) = (
        select start + ceil(n * 1000000 / rate)::bigint, now, n
        from ask,
        lateral (select {micros} as now) as t,
        lateral (select least(greatest(r.full_at, now), now + depth) as start) as s,
        lateral (select now + depth - start as room) as m,
        lateral (select least(tokens, floor(room * rate / 1000000)::bigint + 1) as high) as h,
        lateral (select case when ceil(high * 1000000 / rate) > room
            then high - 1 else high end as n) as g
    )
    returning full_at, asked_at, granted
)
select granted, greatest(0, full_at + ceil(1000000 / rate)::bigint - depth - asked_at)
from taken, ask;
"""

_HELD = """
select key, id, fence, service_name, owner, host, pid,
    extract(epoch from created)::float8, extract(epoch from expires - clock_timestamp())::float8
from {schema}.leases
where expires > clock_timestamp() and (%(key)s::text is null or key = %(key)s)
order by key, created, id;
"""

# At most 1000 rows of each table, and none that another transaction has locked.
_SWEEP = """
delete from {schema}.leases where (key, id) in (
    select key, id from {schema}.leases
    where expires <= clock_timestamp() - interval '1 minute'
    order by key, id limit 1000 for update skip locked
);
delete from {schema}.fences where key in (
    select key from {schema}.fences where given < clock_timestamp() - {kept}::interval
    order by given limit 1000 for update skip locked
);
delete from {schema}.rates where key in (
    select key from {schema}.rates where full_at < {micros} - 60000000
    order by key limit 1000 for update skip locked
);
"""

# Which tables exist, and the role's privileges on them. It reads the catalog, which a role may do
# without privileges on the schema.
_LAYOUT = """
select n.oid is not null,
    coalesce(has_schema_privilege(n.oid, 'usage'), false),
    array_remove(array_agg(c.relname::text), null),
    coalesce(bool_and(has_table_privilege(c.oid, 'select')
        and has_table_privilege(c.oid, 'insert')
        and has_table_privilege(c.oid, 'update')
        and has_table_privilege(c.oid, 'delete')), false),
    current_user::text
from (values ({name})) as wanted (name)
left join pg_catalog.pg_namespace n on n.nspname = wanted.name
left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = any({tables})
group by n.oid;
"""

_GUARD = """
insert into {schema}.guards as g (resource, fence) values (%(resource)s, %(fence)s)
on conflict (resource) do update set fence = excluded.fence where g.fence <= excluded.fence
returning fence
"""

_GUARDED = "select fence from {schema}.guards where resource = %(resource)s"


def ddl(schema: str = "moored") -> str:
    """Return the statements that create the store's tables, to run them by hand."""
    text = sql.SQL("create schema if not exists {schema};\n" + _DDL)
    return text.format(schema=sql.Identifier(schema)).as_string(None)


def grants(role: str, schema: str = "moored") -> str:
    """Return the statements that let a role use tables that another role created."""
    text = sql.SQL(
        "grant usage on schema {schema} to {role};\n"
        "grant select, insert, update, delete on {tables} to {role};"
    )
    tables = sql.SQL(", ").join(sql.Identifier(schema, table) for table in TABLES)
    filled = text.format(schema=sql.Identifier(schema), role=sql.Identifier(role), tables=tables)
    return filled.as_string(None)


class Statements:
    """The statements for the tables of one schema, ready to be sent."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._parts: dict[str, sql.Composable] = {
            "schema": sql.Identifier(schema),
            "name": sql.Literal(schema),
            "lock": sql.Literal(f"moored.leases/{schema}/"),
            "tables": sql.Literal(list(TABLES)),
            "micros": sql.SQL(_MICROS),
            "kept": sql.Literal(_FENCE_KEPT),
        }
        self.acquire = self._call(_ACQUIRE)
        self.renew = self._call(_RENEW)
        self.release = self._call(_RELEASE)
        self.take = self._call(_TAKE)
        self.held = self._call(_HELD)
        self.sweep = self._call(_SWEEP)
        self.layout = self._call(_LAYOUT)
        self.guard = self._filled(_GUARD)
        self.guarded = self._filled(_GUARDED)

    def create_layout(self, *, with_schema: bool) -> bytes:
        """Create what is missing; several clients may run this at the same time."""
        lock = "select pg_advisory_xact_lock(hashtextextended({lock}, 0));\n"
        schema = _SCHEMA if with_schema else ""
        return self._call(lock + schema + _DDL)

    def _call(self, text: LiteralString) -> bytes:
        return self._filled(_TRANSACTION_SETTINGS + text)

    def _filled(self, text: LiteralString) -> bytes:
        return sql.SQL(text).format(**self._parts).as_bytes(None)
