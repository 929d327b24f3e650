"""The tables and functions of an outbox, as SQL: for `install()` and for migration tools.

- `outbox`: the events, in partitions by the time of insertion, so that retention drops whole
  partitions.
- `outbox_state`: everything up to `floor` counts as dropped; no event up to `final` is to come.
- `outbox_cursors`: the position of each consumer.
- `outbox_publish(channel, payload, tenant)`: publish from any language. A plain INSERT does the
  same: a trigger wakes the consumers.
- `outbox_capture()`: a trigger that publishes every change of a table.
- `outbox_partitions()` and `outbox_prune()`: the upkeep, which `Outbox` runs in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, LiteralString

from psycopg import sql

from ..server import CREATE_SCHEMA
from ._publish import check_schema

#: How publishers wake consumers: by NOTIFY, by a message in the WAL, or not at all.
Wake = Literal["notify", "stream", "poll"]
#: The version of the tables and functions; install() replaces older functions.
VERSION = 3

# Several processes may install at the same time.
_BEGIN = "\nselect pg_advisory_xact_lock(hashtextextended({lock}, 0));" + CREATE_SCHEMA
# The index of the order, and the one that makes a page of a tenant cost what the tenant has, are
# created by `moored outbox upgrade` before this, in an older outbox.
_TABLES = """
create table if not exists {schema}.outbox (
    id bigint generated always as identity,
    tenant text,
    channel text not null,
    payload text not null,
    at timestamptz not null default clock_timestamp()
) partition by range (at);
-- Only used if the upkeep has not run for days: an INSERT never fails for want of a partition.
create table if not exists {schema}.outbox_default partition of {schema}.outbox default;
create table if not exists {schema}.outbox_cursors (
    consumer text primary key,
    cursor text not null,
    stored timestamptz not null default clock_timestamp()
);
create table if not exists {schema}.outbox_state (
    version int not null,
    floor bigint not null default 0,
    final bigint not null default 0,
    single bool primary key default true check (single)
);
"""
# Before version 3 the order was that of (xid, id). No publisher is running under this lock, so that
# all events that are visible are final. A cursor goes back to before the first event that its
# consumer has not read; one whose events were dropped stays as it is, and is refused.
_CONVERT = """
do $$
declare
    top bigint;
    bottom bigint;
    grantee text;
begin
    if not exists (select from pg_attribute where attrelid = {outbox}::regclass
            and attname = 'xid' and not attisdropped) then
        return;
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise 'an older outbox is converted only with the isolation level "read committed"';
    end if;
    if current_setting('lock_timeout') = '0' then
        set local lock_timeout = '2s';
    end if;
    lock table {schema}.outbox in share mode;
    select coalesce(min(id) - 1, 0), coalesce(max(id), 0) into bottom, top from {schema}.outbox;
    if top = 0 then
        execute 'select case when is_called then last_value else 0 end from '
            || pg_get_serial_sequence({outbox}, 'id') into top;
        bottom := top;
    end if;
    update {schema}.outbox_cursors c set cursor = (
        select concat_ws('-', system, timeline, read, coalesce((
            select (extract(epoch from o.at) * 1000000)::bigint
            from {schema}.outbox o where o.id = read limit 1), 0))
        from split_part(c.cursor, '-', 1) as system, split_part(c.cursor, '-', 2) as timeline,
            coalesce((select min(o.id) - 1 from {schema}.outbox o where (o.xid, o.id)
                > (split_part(c.cursor, '-', 3)::xid8, split_part(c.cursor, '-', 4)::bigint)
            ), top) as read
    )
    from {schema}.outbox_state s
    where c.cursor ~ '^[0-9]+(-[0-9]+){{4}}$' and (s.floor_xid, s.floor_id)
        <= (split_part(c.cursor, '-', 3)::xid8, split_part(c.cursor, '-', 4)::bigint);
    alter table {schema}.outbox_state add floor bigint not null default 0,
        add final bigint not null default 0;
    update {schema}.outbox_state set final = top,
        floor = case when floor_xid = '0' and floor_id = 0 then 0 else bottom end;
    alter table {schema}.outbox_state drop floor_xid, drop floor_id;
    alter table {schema}.outbox drop xid;
    -- An id that a publisher has chosen itself may be missed.
    for grantee in
        select case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = {outbox}::regclass and a.privilege_type = 'INSERT'
            and a.grantee <> c.relowner
    loop
        execute 'revoke insert on {schema}.outbox from ' || grantee;
        execute 'grant insert (channel, payload, tenant) on {schema}.outbox to ' || grantee;
        execute 'grant update (final) on {schema}.outbox_state to ' || grantee;
    end loop;
end $$;
"""
_INDEXES = """
do $$
begin
    -- Even if the index exists, CREATE INDEX would wait for the publishers.
    if to_regclass({by_id}) is null then
        create index outbox_by_id on {schema}.outbox (id);
    end if;
    if to_regclass({by_tenant}) is null then
        create index outbox_by_tenant on {schema}.outbox (tenant, id) where tenant is not null;
    end if;
end $$;
insert into {schema}.outbox_state (version) values ({version})
    on conflict (single) do update set version = excluded.version;
"""

_FUNCTIONS = """
create or replace function {schema}.outbox_publish(
    channel text, payload text, tenant text default null
) returns void language plpgsql as $$
begin
    insert into {schema}.outbox (channel, payload, tenant) values ($1, $2, $3);
end $$;

-- The arguments of the trigger are the channel and, if given, the column with the tenant. An UPDATE
-- of that column is published as a delete for the old tenant and an insert for the new one.
create or replace function {schema}.outbox_capture() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp as $$
declare
    before json := row_to_json(old);
    after json := row_to_json(new);
    moved bool := TG_OP = 'UPDATE'
        and before ->> TG_ARGV[1] is distinct from after ->> TG_ARGV[1];
begin
    insert into {schema}.outbox (channel, tenant, payload)
    select TG_ARGV[0], coalesce(e.new, e.old) ->> TG_ARGV[1],
        json_build_object('op', e.op, 'table', TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME,
            'old', e.old, 'new', e.new)::text
    from (values
        (not moved, lower(TG_OP), before, after),
        (moved, 'delete', before, null),
        (moved, 'insert', null, after)
    ) as e (applies, op, old, new)
    where e.applies;
    return null;
end $$;

-- Move a consumer's cursor, if it is where the consumer has left it. Otherwise raise, so that the
-- caller's transaction does not commit.
create or replace function {schema}.outbox_store(name text, old_cursor text, new_cursor text)
returns void language plpgsql as $$
begin
    update {schema}.outbox_cursors set cursor = new_cursor, stored = clock_timestamp()
    where consumer = name and cursor = old_cursor;
    if not found then
        raise exception 'the cursor of consumer "%" was moved or removed', name
            using errcode = 'MO001', hint = 'another process consumes under this name, or a '
                'transaction that had stored the cursor was rolled back: consume again';
    end if;
end $$;

-- Create the partitions of the next periods. ATTACH does not wait for publishers, which CREATE
-- TABLE … PARTITION OF would do.
create or replace function {schema}.outbox_partitions(
    every interval default '1 day', ahead int default 3
) returns int language plpgsql security definer
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '500ms' as $$
declare
    origin constant timestamptz := '2000-01-01';
    starts timestamptz;
    name text;
    created int := 0;
begin
    if not pg_try_advisory_xact_lock(hashtextextended({lock}, 0)) then
        return 0;
    end if;
    select greatest(date_bin(every, now(), origin), max(ends),
        (select date_bin(every, max(at), origin) + every from {schema}.outbox_default))
    into starts from {schema}.outbox_parts;
    while starts < now() + ahead * every loop
        name := 'outbox_' || to_char(starts, 'YYYYMMDD_HH24MISS');
        execute format('create table {schema}.%I (like {schema}.outbox including defaults '
            'including storage)', name);
        execute format('alter table {schema}.outbox attach partition {schema}.%I '
            'for values from (%L) to (%L)', name, starts, starts + every);
        starts := starts + every;
        created := created + 1;
    end loop;
    return created;
exception when lock_not_available then
    return 0;
end $$;

-- Drop partitions that are older than `retain`, and then the oldest ones until the rest has at most
-- `max_bytes`; never the current one. Returns null if an open transaction prevents it: the
-- publishers that queue behind this function wait for half a second at most.
create or replace function {schema}.outbox_prune(retain interval, max_bytes bigint default null)
returns int language plpgsql security definer
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '500ms' as $$
declare
    oldest constant timestamptz := now() - retain;
    part text;
    parts text[];
    last bigint;
begin
    if not pg_try_advisory_xact_lock(hashtextextended({lock}, 0)) then
        return 0;
    end if;
    parts := array(
        select name::text
        from (
            select name, ends, sum(bytes) over (order by ends desc nulls first) as with_newer
            from {schema}.outbox_parts
        ) as p
        where ends < now() and (ends <= oldest or with_newer > max_bytes)
        order by ends
    );
    if (select max(at) from {schema}.outbox_default) < oldest then
        parts := array_append(parts, {default});
    end if;
    foreach part in array parts loop
        -- The parent first, as every reader and publisher does, so that no deadlock is possible.
        lock table only {schema}.outbox in access exclusive mode;
        execute format('lock table %s in access exclusive mode', part);
        execute format('select max(id) from %s', part) into last;
        update {schema}.outbox_state set floor = greatest(floor, last);
        execute format(case part when {default} then 'truncate %s' else 'drop table %s' end, part);
    end loop;
    return cardinality(parts);
exception when lock_not_available then
    return null;
end $$;
revoke execute on function {schema}.outbox_partitions, {schema}.outbox_prune from public;
"""

# Without an end: the default partition.
_PARTS = """
create or replace view {schema}.outbox_parts as
select c.oid::regclass as name, pg_total_relation_size(c.oid) as bytes,
    substring(pg_get_expr(c.relpartbound, c.oid) from 'TO \\(''([^'']+)''\\)')::timestamptz as ends
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = {outbox}::regclass;
"""

# Without a payload, so that the server folds the notifications of a transaction into one.
_WAKE_BY: dict[Wake, LiteralString] = {
    "notify": "pg_notify({channel}, '')",
    "stream": "pg_logical_emit_message(true, {channel}, '')",
}
_WAKE = (
    """
create or replace function {schema}.outbox_wake() returns trigger language plpgsql as $$
begin
    perform """,
    """;
    return null;
end $$;
do $$
begin
    -- Even if the trigger exists, CREATE TRIGGER would wait for the publishers.
    if not exists (select from pg_trigger where tgrelid = {outbox}::regclass
            and tgname = 'outbox_wake' and tgenabled in ('O', 'A')) then
        create or replace trigger outbox_wake after insert on {schema}.outbox
            for each statement execute function {schema}.outbox_wake();
    end if;
end $$;
""",
)
_NO_WAKE = """
do $$
begin
    if exists (select from pg_trigger where tgrelid = {outbox}::regclass
            and tgname = 'outbox_wake') then
        drop trigger if exists outbox_wake on {schema}.outbox;
    end if;
end $$;
"""
_FIRST = """
select {schema}.outbox_partitions();
"""

_GRANTS = """
grant usage on schema {schema} to {role};
grant select on {schema}.outbox to {role};
-- An id that a publisher has chosen itself may be missed.
grant insert (channel, payload, tenant) on {schema}.outbox to {role};
grant select, insert, update, delete on {schema}.outbox_cursors to {role};
grant select on {schema}.outbox_state, {schema}.outbox_parts to {role};
grant update (final) on {schema}.outbox_state to {role};
grant execute on function {schema}.outbox_partitions, {schema}.outbox_prune to {role};
"""

# The arguments of the triggers of a table, and whether they are of this outbox and work.
_CAPTURED = """
select tgargs, tgfoid = to_regproc({capture}) and tgenabled in ('O', 'A')
from pg_trigger where tgrelid = to_regclass({table})
    and tgname in ('moored_outbox_capture', 'moored_outbox_truncate')
"""
_CAPTURE = """
create or replace trigger moored_outbox_capture after insert or update or delete on {table}
    for each row execute function {schema}.outbox_capture({arguments});
create or replace trigger moored_outbox_truncate after truncate on {table}
    for each statement execute function {schema}.outbox_capture({arguments});
"""
_UNCAPTURE = """
drop trigger if exists moored_outbox_capture on {table};
drop trigger if exists moored_outbox_truncate on {table};
"""

# A trigger function has only triggers that depend on it: those of the captured tables.
_REMOVE = """
select pg_advisory_xact_lock(hashtextextended({lock}, 0));
drop function if exists {schema}.outbox_capture() cascade;
drop view if exists {schema}.outbox_parts;
drop table if exists {schema}.outbox, {schema}.outbox_cursors, {schema}.outbox_state;
drop function if exists {schema}.outbox_publish, {schema}.outbox_store,
    {schema}.outbox_partitions, {schema}.outbox_prune, {schema}.outbox_wake;
"""


def ddl(schema: str = "moored", *, wake: Wake = "notify") -> str:
    """Return the statements that create an outbox, or bring an older one up to date.

    :param wake: how publishers wake consumers; see `Outbox`.
    """
    by = _WAKE_BY.get(wake)
    trigger: LiteralString = _NO_WAKE if by is None else by.join(_WAKE)
    text = _BEGIN + _TABLES + _CONVERT + _INDEXES + _PARTS + _FUNCTIONS + trigger + _FIRST
    return _filled(text, schema)


def grants(role: str, schema: str = "moored") -> str:
    """Return the statements that let a role publish, consume and run the upkeep."""
    return _filled(_GRANTS, schema, role=sql.Identifier(role))


def removal(schema: str = "moored") -> str:
    """Return the statements that drop an outbox with its events; the schema stays."""
    return _filled(_REMOVE, schema)


def captured(table: str, schema: str = "moored") -> str:
    """Return the query for the triggers that `capture()` has created for a table."""
    return _filled(_CAPTURED, schema, table=sql.Literal(_table(table).as_string(None)))


def capture(table: str, arguments: Sequence[str], schema: str = "moored") -> str:
    """Return the statements that publish each change of a table from now on."""
    given = sql.SQL(", ").join(map(sql.Literal, arguments))
    return _filled(_CAPTURE, schema, table=_table(table), arguments=given)


def uncapture(table: str) -> str:
    """Return the statements that end the capture of a table."""
    return _filled(_UNCAPTURE, table=_table(table))


def wake_channel(schema: str) -> str:
    """Return the channel of NOTIFY that wakes the consumers of an outbox."""
    return f"{schema}_outbox"


def _table(name: str) -> sql.Identifier:
    return sql.Identifier(*name.split("."))


def parts(schema: str) -> dict[str, sql.Composable]:
    """Return what the statements of an outbox are filled with."""

    def name(table: str) -> sql.Literal:
        return sql.Literal(sql.Identifier(schema, table).as_string(None))

    return {
        "schema": sql.Identifier(check_schema(schema)),
        "outbox": name("outbox"),
        "default": name("outbox_default"),
        "capture": name("outbox_capture"),
        "by_id": name("outbox_by_id"),
        "by_tenant": name("outbox_by_tenant"),
        "channel": sql.Literal(wake_channel(schema)),
        "lock": sql.Literal(f"moored.outbox/{schema}"),
        "version": sql.Literal(VERSION),
    }


def _filled(text: LiteralString, schema: str = "moored", **more: sql.Composable) -> str:
    return sql.SQL(text).format(**parts(schema), **more).as_string(None).strip() + "\n"
