"""The manager's administrative queries: lock, slot, publication, what they wait for, and types."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from .._lsn import Lsn
from ..decode import OwnType
from ._connect import uncancelled

__all__ = [
    "Blocker",
    "LockHolder",
    "Retained",
    "blockers",
    "break_lock",
    "drop_publication",
    "drop_slot",
    "lock_holder",
    "own_types",
    "retained",
    "rows",
    "terminate",
]

Connection = psycopg.AsyncConnection[Any]

#: The timeout of one query, in seconds.
TIMEOUT = 5.0
#: For how long, and how often, dropping a slot that is still active is tried, in seconds.
DROP_PATIENCE, DROP_EVERY = 2.0, 0.05
#: A backend that holds the lock of an inactive slot and was idle for so long is terminated.
QUIET = 10.0

#: For how long, and how often, `terminate` waits for a backend to end by itself, in seconds.
END_PATIENCE, END_EVERY = 2.0, 0.05

# Only an idle holder of the lock of an inactive slot is terminated. The slot of a healthy new owner
# is inactive as well until it streams, but that owner runs a query every few seconds.
_BREAK = """
WITH inactive_slots AS (
  SELECT slot_name FROM pg_replication_slots
  WHERE active = false AND database = current_database() AND slot_name = %(slot)s
),
stuck_backends AS (
  SELECT l.pid
  FROM pg_locks l
  JOIN inactive_slots s
    ON hashtext(s.slot_name)::bigint = (l.classid::bigint << 32) | l.objid::bigint
  JOIN pg_stat_activity a ON a.pid = l.pid
  WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.pid <> %(own)s
    AND a.state = 'idle' AND a.state_change < now() - %(quiet)s * interval '1 second'
)
SELECT pid, pg_terminate_backend(pid) FROM stuck_backends
"""
_HOLDER = """
SELECT a.pid, a.application_name, coalesce(host(a.client_addr), 'local'),
       extract(epoch FROM now() - a.backend_start)::float,
       coalesce((SELECT active FROM pg_replication_slots WHERE slot_name = %(slot)s), false)
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
  AND hashtext(%(slot)s)::bigint = (l.classid::bigint << 32) | l.objid::bigint
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_BLOCKERS = """
SELECT pid, extract(epoch FROM now() - xact_start)::float, left(query, 200)
FROM pg_stat_activity
WHERE backend_xid IS NOT NULL AND pid <> ALL (%(own)s) AND backend_type = 'client backend'
ORDER BY xact_start
"""
_RETAINED = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint,
       greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn), 0)::bigint,
       pg_current_wal_lsn(), active_pid, wal_status
FROM pg_replication_slots WHERE slot_name = %(slot)s
"""
#: The types, and those that are not built in of which they are made.
_TYPES = """
WITH RECURSIVE wanted AS (
  SELECT unnest(%(oids)s::oid[]) AS oid
  UNION
  SELECT part.oid FROM wanted w CROSS JOIN LATERAL (
    SELECT e.oid FROM pg_type t JOIN pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
    WHERE t.oid = w.oid
    UNION ALL SELECT typbasetype FROM pg_type WHERE oid = w.oid
    UNION ALL SELECT rngsubtype FROM pg_range WHERE w.oid IN (rngtypid, rngmultitypid)
    UNION ALL SELECT a.atttypid FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
    WHERE t.oid = w.oid AND a.attnum > 0 AND NOT a.attisdropped
  ) part (oid) WHERE part.oid >= 16384
)
SELECT t.oid, t.typname::text, CASE WHEN e.oid IS NULL THEN t.typtype::text ELSE 'a' END,
  coalesce(e.oid, r.rngsubtype, t.typbasetype), coalesce(e.typdelim::text, ','),
  coalesce(f.names, '{}'), coalesce(f.types, '{}')
FROM wanted JOIN pg_type t USING (oid)
LEFT JOIN pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
LEFT JOIN pg_range r ON t.oid IN (r.rngtypid, r.rngmultitypid)
LEFT JOIN LATERAL (
  SELECT array_agg(attname::text ORDER BY attnum) AS names,
    array_agg(atttypid ORDER BY attnum) AS types
  FROM pg_attribute WHERE attrelid = t.typrelid AND attnum > 0 AND NOT attisdropped
) f ON t.typtype = 'c'
"""


# left(query, 200) may truncate a string or a comment: then it extends to the end.
_LITERAL = re.compile(
    r"""
    \b[eE]'(?:\\.|''|[^'\\])*(?:'|\\?$) | '(?:''|[^'])*(?:'|$)
    | \$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|$) | \b\d[\w.]*
    | --[^\n]* | /\*.*?(?:\*/|$)
    """,
    re.DOTALL | re.VERBOSE,
)


class LockHolder(NamedTuple):
    """The backend that holds the lock."""

    pid: int
    application: str
    #: The client's address; "local" for a Unix-domain socket.
    address: str
    #: The age of its connection, in seconds.
    age: float
    #: Whether the slot is active.
    streaming: bool


class Blocker(NamedTuple):
    """A transaction that the creation of a slot waits for."""

    pid: int
    #: Since its start, in seconds.
    age: float
    #: Its SQL without literals; empty unless `show_queries`.
    query: str


class Retained(NamedTuple):
    """The WAL that the server retains for the slot."""

    #: Bytes from the slot's restart_lsn to the end of the WAL.
    bytes: int
    #: Bytes from the slot's confirmed_flush_lsn to the end of the WAL.
    lag: int
    #: The end of the WAL.
    current: Lsn
    active_pid: int | None
    wal_status: str | None


async def rows(conn: Connection, query: str | sql.Composed, **values: Any) -> list[Any]:
    """Run a statement and return its rows; abort the connection after `TIMEOUT`."""
    return await uncancelled(conn, _fetch(conn, query, values), TIMEOUT)


async def _fetch(conn: Connection, query: str | sql.Composed, values: dict[str, Any]) -> list[Any]:
    text = query.encode() if isinstance(query, str) else query
    cursor = await conn.execute(text, values or None)
    return await cursor.fetchall() if cursor.description else []


async def break_lock(conn: Connection, slot: str, own_pid: int) -> list[int]:
    """Terminate idle backends that hold the lock of an inactive slot; return their pids."""
    return [row[0] for row in await rows(conn, _BREAK, slot=slot, own=own_pid, quiet=QUIET)]


async def lock_holder(conn: Connection, slot: str) -> LockHolder | None:
    """Return the backend that holds the lock of the slot; None if it is free."""
    found = await rows(conn, _HOLDER, slot=slot)
    return LockHolder(*found[0]) if found else None


async def blockers(conn: Connection, own: Sequence[int], *, queries: bool) -> list[Blocker]:
    """Return the transactions that a new slot waits for, the oldest first.

    :param own: pids of this instance, which are left out.
    :param queries: include their SQL, without literals.
    """
    return [
        Blocker(pid, age, without_literals(query) if queries else "")
        for pid, age, query in await rows(conn, _BLOCKERS, own=list(own))
    ]


def without_literals(query: str) -> str:
    """Return SQL without its strings, numbers and comments, which may be secrets."""
    return " ".join(_LITERAL.sub("…", query).split())


async def retained(conn: Connection, slot: str) -> Retained | None:
    """Return how much WAL the server retains for the slot; None if there is no such slot."""
    found = await rows(conn, _RETAINED, slot=slot)
    if not found:
        return None
    kept, lag, current, active_pid, wal_status = found[0]
    return Retained(kept or 0, lag or 0, Lsn.parse(current), active_pid, wal_status)


async def own_types(conn: Connection, oids: Collection[int]) -> list[OwnType]:
    """Describe types that are not built in, and those of which they are made."""
    found = await rows(conn, _TYPES, oids=sorted(oids))
    return [
        OwnType(oid, name, kind, part, delimiter, tuple(names), tuple(fields))
        for oid, name, kind, part, delimiter, names, fields in found
    ]


async def terminate(conn: Connection, pid: int) -> None:
    """Terminate a backend if it does not end by itself within two seconds."""
    for _ in range(round(END_PATIENCE / END_EVERY)):
        if not await rows(conn, "SELECT 1 FROM pg_stat_activity WHERE pid = %(pid)s", pid=pid):
            return
        await asyncio.sleep(END_EVERY)
    # Only if it still exists: for an unknown pid, the server logs a warning.
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %(pid)s"
    await rows(conn, query, pid=pid)


async def drop_slot(conn: Connection, slot: str) -> None:
    """Drop the slot, if it exists; retry while a reader that was ended is still active."""
    query = (
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
        "WHERE slot_name = %(slot)s AND database = current_database()"
    )
    tries = round(DROP_PATIENCE / DROP_EVERY)
    for left in reversed(range(tries)):
        try:
            await rows(conn, query, slot=slot)
            return
        except psycopg.errors.ObjectInUse:
            if not left:
                raise
        await conn.rollback()
        await asyncio.sleep(DROP_EVERY)


async def drop_publication(conn: Connection, publication: str) -> None:
    """Drop the publication, if it exists."""
    query = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication))
    await rows(conn, query)
