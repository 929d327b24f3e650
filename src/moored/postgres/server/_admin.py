"""What the manager asks of the server besides streaming: each question with its exact words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from .._lsn import Lsn
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
    "log_standby_snapshot",
    "retained",
    "rows",
    "terminate",
]

#: How long one of these may take.
TIMEOUT = 5.0
#: For how long, and how often, a slot that is being read is tried to be dropped.
DROP_PATIENCE, DROP_EVERY = 2.0, 0.05
#: A holder of the lock that gave no sign of life for so long is abandoned, if its slot is not read.
QUIET = 10.0

#: How often to look whether a connection that was closed here has ended at the server.
_LOOKS = 40

# Only an idle holder of the lock of a slot that nobody reads is abandoned. A healthy new owner
# holds the lock, too, before it streams: but it gives a sign of life every few seconds.
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


# A string or comment may be cut off by left(query, 200): then it reaches to the end.
_LITERAL = re.compile(
    r"""
    \b[eE]'(?:\\.|''|[^'\\])*(?:'|\\?$) | '(?:''|[^'])*(?:'|$)
    | \$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|$) | \b\d[\w.]*
    | --[^\n]* | /\*.*?(?:\*/|$)
    """,
    re.DOTALL | re.VERBOSE,
)


class LockHolder(NamedTuple):
    """Who has the lock."""

    pid: int
    application: str
    #: The address that it comes from; "local" for one of the server's own machine.
    address: str
    #: For how many seconds its connection has lived.
    age: float
    #: Whether its slot is being read.
    streaming: bool


class Blocker(NamedTuple):
    """A transaction that a new slot must wait for."""

    pid: int
    age: float
    #: Its SQL without literals; empty unless `show_queries`.
    query: str


class Retained(NamedTuple):
    """What the server keeps for the slot."""

    #: Bytes of log that it keeps, and how far the slot is behind.
    bytes: int
    lag: int
    current: Lsn
    active_pid: int | None
    wal_status: str | None


async def rows(
    conn: psycopg.AsyncConnection[Any], query: str | sql.Composed, **values: Any
) -> list[Any]:
    """Run a statement and return its rows; a server that does not answer is hung up on."""
    return await uncancelled(conn, _ask(conn, query, values), TIMEOUT)


async def _ask(
    conn: psycopg.AsyncConnection[Any], query: str | sql.Composed, values: dict[str, Any]
) -> list[Any]:
    text = query.encode() if isinstance(query, str) else query
    cursor = await conn.execute(text, values or None)
    return await cursor.fetchall() if cursor.description else []


async def break_lock(conn: psycopg.AsyncConnection[Any], slot: str, own_pid: int) -> list[int]:
    """End connections that hold the lock of a slot that nobody reads; returns their pids."""
    return [row[0] for row in await rows(conn, _BREAK, slot=slot, own=own_pid, quiet=QUIET)]


async def lock_holder(conn: psycopg.AsyncConnection[Any], slot: str) -> LockHolder | None:
    """Who has the lock of the slot."""
    found = await rows(conn, _HOLDER, slot=slot)
    return LockHolder(*found[0]) if found else None


async def blockers(
    conn: psycopg.AsyncConnection[Any], own: Sequence[int], *, queries: bool
) -> list[Blocker]:
    """The transactions that a new slot waits for, the oldest first; `queries`: with their SQL."""
    return [
        Blocker(pid, age, without_literals(query) if queries else "")
        for pid, age, query in await rows(conn, _BLOCKERS, own=list(own))
    ]


def without_literals(query: str) -> str:
    """SQL of another session without its strings, numbers and comments: they may be secrets."""
    return " ".join(_LITERAL.sub("…", query).split())


async def log_standby_snapshot(conn: psycopg.AsyncConnection[Any]) -> None:
    """Have the server write what a waiting slot looks for, without waiting for its own time."""
    await rows(conn, "SELECT pg_log_standby_snapshot()")


async def retained(conn: psycopg.AsyncConnection[Any], slot: str) -> Retained | None:
    """What the server keeps for the slot."""
    found = await rows(conn, _RETAINED, slot=slot)
    if not found:
        return None
    kept, lag, current, active_pid, wal_status = found[0]
    return Retained(kept or 0, lag or 0, Lsn.parse(current), active_pid, wal_status)


async def terminate(conn: psycopg.AsyncConnection[Any], pid: int) -> None:
    """End a connection at the server, if that has not ended it by itself in a moment."""
    for _ in range(_LOOKS):
        if not await rows(conn, "SELECT 1 FROM pg_stat_activity WHERE pid = %(pid)s", pid=pid):
            return
        await asyncio.sleep(0.05)
    # Only if it is still there: the server warns in its log of a pid that is not.
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %(pid)s"
    await rows(conn, query, pid=pid)


async def drop_slot(conn: psycopg.AsyncConnection[Any], slot: str) -> None:
    """Drop the slot, if it exists; a reader that was ended may have it for a moment more."""
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


async def drop_publication(conn: psycopg.AsyncConnection[Any], publication: str) -> None:
    """Drop the publication, if it exists."""
    query = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication))
    await rows(conn, query)
