-- An outbox as Moored installed it before version 3, with a role that may use it.
select pg_advisory_xact_lock(hashtextextended('moored.outbox/moored', 0));
create schema if not exists "moored";

create table if not exists "moored".outbox (
    id bigint generated always as identity,
    xid xid8 not null default pg_current_xact_id(),
    tenant text,
    channel text not null,
    payload text not null,
    at timestamptz not null default clock_timestamp()
) partition by range (at);
create index if not exists outbox_order on "moored".outbox (xid, id);
-- Only used if the upkeep has not run for days: an INSERT never fails for want of a partition.
create table if not exists "moored".outbox_default partition of "moored".outbox default;
create table if not exists "moored".outbox_cursors (
    consumer text primary key,
    cursor text not null,
    stored timestamptz not null default clock_timestamp()
);
create table if not exists "moored".outbox_state (
    version int not null,
    floor_xid xid8 not null default '0',
    floor_id bigint not null default 0,
    single bool primary key default true check (single)
);
insert into "moored".outbox_state (version) values (2)
    on conflict (single) do update set version = excluded.version;

create or replace view "moored".outbox_parts as
select c.oid::regclass as name, pg_total_relation_size(c.oid) as bytes,
    substring(pg_get_expr(c.relpartbound, c.oid) from 'TO \(''([^'']+)''\)')::timestamptz as ends
from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = '"moored"."outbox"'::regclass;

create or replace function "moored".outbox_publish(
    channel text, payload text, tenant text default null
) returns void language plpgsql as $$
begin
    insert into "moored".outbox (channel, payload, tenant) values ($1, $2, $3);
end $$;

-- The arguments of the trigger are the channel and, if given, the column with the tenant. An UPDATE
-- of that column is published as a delete for the old tenant and an insert for the new one.
create or replace function "moored".outbox_capture() returns trigger language plpgsql
security definer set search_path = pg_catalog, pg_temp as $$
declare
    before json := row_to_json(old);
    after json := row_to_json(new);
    moved bool := TG_OP = 'UPDATE'
        and before ->> TG_ARGV[1] is distinct from after ->> TG_ARGV[1];
begin
    insert into "moored".outbox (channel, tenant, payload)
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
create or replace function "moored".outbox_store(name text, old_cursor text, new_cursor text)
returns void language plpgsql as $$
begin
    update "moored".outbox_cursors set cursor = new_cursor, stored = clock_timestamp()
    where consumer = name and cursor = old_cursor;
    if not found then
        raise exception 'the cursor of consumer "%" was moved or removed', name
            using errcode = 'MO001', hint = 'another process consumes under this name, or a '
                'transaction that had stored the cursor was rolled back: consume again';
    end if;
end $$;

-- Create the partitions of the next periods. ATTACH does not wait for publishers, which CREATE
-- TABLE … PARTITION OF would do.
create or replace function "moored".outbox_partitions(
    every interval default '1 day', ahead int default 3
) returns int language plpgsql security definer
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '500ms' as $$
declare
    origin constant timestamptz := '2000-01-01';
    starts timestamptz;
    name text;
    created int := 0;
begin
    if not pg_try_advisory_xact_lock(hashtextextended('moored.outbox/moored', 0)) then
        return 0;
    end if;
    -- After a dump was loaded into another server, rows may have xids that are still to come here.
    update "moored".outbox set xid = pg_current_xact_id() where xid > pg_current_xact_id();
    update "moored".outbox_state set floor_xid = '0', floor_id = 0
    where floor_xid > pg_current_xact_id();
    select greatest(date_bin(every, now(), origin), max(ends),
        (select date_bin(every, max(at), origin) + every from "moored".outbox_default))
    into starts from "moored".outbox_parts;
    while starts < now() + ahead * every loop
        name := 'outbox_' || to_char(starts, 'YYYYMMDD_HH24MISS');
        execute format('create table "moored".%I (like "moored".outbox including defaults '
            'including storage)', name);
        execute format('alter table "moored".outbox attach partition "moored".%I '
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
create or replace function "moored".outbox_prune(retain interval, max_bytes bigint default null)
returns int language plpgsql security definer
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '500ms' as $$
declare
    oldest constant timestamptz := now() - retain;
    part text;
    parts text[];
    last record;
begin
    if not pg_try_advisory_xact_lock(hashtextextended('moored.outbox/moored', 0)) then
        return 0;
    end if;
    parts := array(
        select name::text
        from (
            select name, ends, sum(bytes) over (order by ends desc nulls first) as with_newer
            from "moored".outbox_parts
        ) as p
        where ends < now() and (ends <= oldest or with_newer > max_bytes)
        order by ends
    );
    if (select max(at) from "moored".outbox_default) < oldest then
        parts := array_append(parts, '"moored"."outbox_default"');
    end if;
    foreach part in array parts loop
        -- The parent first, as every reader and publisher does, so that no deadlock is possible.
        lock table only "moored".outbox in access exclusive mode;
        execute format('lock table %s in access exclusive mode', part);
        execute format('select xid, id from %s order by xid desc, id desc limit 1', part)
            into last;
        update "moored".outbox_state set floor_xid = last.xid, floor_id = last.id
        where (floor_xid, floor_id) < (last.xid, last.id);
        execute format(case part when '"moored"."outbox_default"' then 'truncate %s' else 'drop table %s' end, part);
    end loop;
    return cardinality(parts);
exception when lock_not_available then
    return null;
end $$;
revoke execute on function "moored".outbox_partitions, "moored".outbox_prune from public;

create or replace function "moored".outbox_wake() returns trigger language plpgsql as $$
begin
    perform pg_notify('moored_outbox', '');
    return null;
end $$;
create or replace trigger outbox_wake after insert on "moored".outbox
    for each statement execute function "moored".outbox_wake();

select "moored".outbox_partitions();
grant usage on schema "moored" to "older";
grant select, insert on "moored".outbox to "older";
grant select, insert, update, delete on "moored".outbox_cursors to "older";
grant select on "moored".outbox_state, "moored".outbox_parts to "older";
grant execute on function "moored".outbox_partitions, "moored".outbox_prune to "older";
