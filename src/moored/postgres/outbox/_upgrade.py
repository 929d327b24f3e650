"""Bring an older outbox up to date: its indexes are built while publishers go on."""

from __future__ import annotations

from collections.abc import Callable

from psycopg import sql

from moored.kernel import counted

from ._reader import Reader

#: The indexes of an outbox, and what they are on.
_INDEXES = (
    ("outbox_by_id", "(id)"),
    ("outbox_by_tenant", "(tenant, id) where tenant is not null"),
)
# An index of the parent is on all partitions, so it cannot be built concurrently. It begins empty,
# and is valid once each partition has one of its own that belongs to it.
_NEXT = """
select parent.oid is null, part.relname, pg_relation_size(part.oid), child.relname,
    coalesce(x.indisvalid, false)
from (select to_regclass({outbox}) as of) as it
left join pg_class parent on parent.relname = %(name)s
    and parent.relnamespace = (select relnamespace from pg_class where oid = it.of)
left join pg_inherits i on i.inhparent = it.of and parent.oid is not null
left join pg_class part on part.oid = i.inhrelid
left join pg_class child on child.relnamespace = parent.relnamespace
    and child.relname = part.relname || substr(%(name)s, 7)
left join pg_index x on x.indexrelid = child.oid
where parent.oid is null or part.oid is not null and not exists (
    select from pg_inherits own join pg_index o on o.indexrelid = own.inhrelid
    where own.inhparent = parent.oid and o.indrelid = part.oid
)
order by part.relname limit 1
"""
_PARENT = "create index {name} on only {schema}.outbox {on}"
_DROP = "drop index concurrently {schema}.{child}"
_BUILD = "create index concurrently {child} on {schema}.{part} {on}"
_ATTACH = "alter index {schema}.{name} attach partition {schema}.{child}"


async def build_indexes(reader: Reader, report: Callable[[str], object]) -> None:
    """Build the indexes that are missing, one partition after the other."""
    for name, on in _INDEXES:
        # A partition may be created or dropped meanwhile.
        while found := await reader.run(_NEXT, name=name):
            ((no_parent, part, size, child, valid),) = found
            names = {
                "name": sql.Identifier(name),
                "on": sql.SQL(on),
                "part": sql.Identifier(part or ""),
                "child": sql.Identifier(child or f"{part}{name[6:]}"),
            }
            if no_parent:
                await reader.change(_PARENT, **names)
            elif child is None:
                report(
                    f"building {name} of {part} ({counted(size, 'byte')}), once the transactions "
                    "that are open now have ended"
                )
                await reader.alone(_BUILD, **names)
            elif valid:
                await reader.change(_ATTACH, **names)
            else:
                report(f"dropping what an interrupted run has left of {name} of {part}")
                await reader.alone(_DROP, **names)
