"""What the manager asks of the server besides streaming: each question with its exact words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from ._lsn import Lsn

__all__ = [
    "Blocker",
    "Holder",
    "Retained",
    "add_tables",
    "blockers",
    "break_lock",
    "drop_publication",
    "drop_slot",
    "lock_holder",
    "log_standby_snapshot",
    "retained",
    "terminate",
    "unpublished",
]

#: How long one of these may take.
TIMEOUT = 5.0
#: How long a table may be waited for: whoever wants to write to it waits behind.
LOCK_PATIENCE = 1.0
#: A holder of the lock that gave no sign of life for so long is abandoned, if its slot is not read.
QUIET = 10.0

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
SELECT a.pid, a.application_name, extract(epoch FROM now() - a.backend_start)::float,
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


class Holder(NamedTuple):
    """Who has the lock."""

    pid: int
    application: str
    #: For how many seconds its connection has lived.
    age: float
    #: Whether its slot is being read.
    streaming: bool


class Blocker(NamedTuple):
    """A transaction that a new slot must wait for."""

    pid: int
    age: float
    query: str


class Retained(NamedTuple):
    """What the server keeps for the slot."""

    #: Bytes of log that it keeps, and how far the slot is behind.
    bytes: int
    lag: int
    current: Lsn
    active_pid: int | None
    wal_status: str | None


async def _rows(conn: psycopg.AsyncConnection[Any], query: str, **values: Any) -> list[Any]:
    asking = asyncio.ensure_future(_ask(conn, query, values))
    # What it says when nobody waits for it any more is nobody's.
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        answered, _ = await asyncio.wait({asking}, timeout=TIMEOUT)
    finally:
        if not asking.done():
            # Not cancelled: the driver would ask a silent server, for many seconds more, to cancel
            # the query.
            _hang_up(conn)
            await asyncio.wait({asking})
    if not answered:
        raise TimeoutError(f"the server did not answer within {TIMEOUT:g} s")
    return asking.result()


async def _ask(conn: psycopg.AsyncConnection[Any], query: str, values: dict[str, Any]) -> list[Any]:
    return await (await conn.execute(query.encode(), values)).fetchall()


def _hang_up(conn: psycopg.AsyncConnection[Any]) -> None:
    """End a connection from below; whoever waits on it is told at once."""
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(conn.pgconn.socket)) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


async def break_lock(conn: psycopg.AsyncConnection[Any], slot: str, own_pid: int) -> list[int]:
    """End connections that hold the lock of a slot that nobody reads; returns their pids."""
    return [row[0] for row in await _rows(conn, _BREAK, slot=slot, own=own_pid, quiet=QUIET)]


async def lock_holder(conn: psycopg.AsyncConnection[Any], slot: str) -> Holder | None:
    """Who has the lock of the slot."""
    rows = await _rows(conn, _HOLDER, slot=slot)
    return Holder(*rows[0]) if rows else None


async def blockers(conn: psycopg.AsyncConnection[Any], own: Sequence[int]) -> list[Blocker]:
    """The transactions that a new slot waits for, the oldest first."""
    return [Blocker(*row) for row in await _rows(conn, _BLOCKERS, own=list(own))]


async def log_standby_snapshot(conn: psycopg.AsyncConnection[Any]) -> None:
    """Have the server write what a waiting slot looks for, without waiting for its own time."""
    await _rows(conn, "SELECT pg_log_standby_snapshot()")


async def retained(conn: psycopg.AsyncConnection[Any], slot: str) -> Retained | None:
    """What the server keeps for the slot."""
    rows = await _rows(conn, _RETAINED, slot=slot)
    if not rows:
        return None
    kept, lag, current, active_pid, wal_status = rows[0]
    return Retained(kept or 0, lag or 0, Lsn.parse(current), active_pid, wal_status)


async def terminate(conn: psycopg.AsyncConnection[Any], pid: int) -> None:
    """End a connection at the server."""
    await _rows(conn, "SELECT pg_terminate_backend(%(pid)s)", pid=pid)


async def drop_slot(conn: psycopg.AsyncConnection[Any], slot: str) -> None:
    """Drop the slot, if it exists."""
    query = (
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
        "WHERE slot_name = %(slot)s AND database = current_database()"
    )
    await _rows(conn, query, slot=slot)


async def drop_publication(conn: psycopg.AsyncConnection[Any], publication: str) -> None:
    """Drop the publication, if it exists."""
    query = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication))
    await conn.execute(query)


async def add_tables(
    conn: psycopg.AsyncConnection[Any], publication: str, tables: Sequence[str]
) -> list[str]:
    """Add tables to the publication; returns those that were not in it.

    Each is locked first: what a transaction that is under way writes to it would otherwise be
    published by nobody, for ever. If that takes long, it raises `LockNotAvailable`: others wait
    behind it, and it is to be tried again later.
    """
    added = []
    for table in sorted(set(tables)):
        async with conn.transaction():
            if not await unpublished(conn, publication, [table]):
                continue
            name = sql.Identifier(*table.split(".", 1))
            limit = sql.Literal(f"{LOCK_PATIENCE:g}s")
            await conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(limit))
            await conn.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(name))
            if await _is_partitioned(conn, table):
                # Otherwise its changes come under the names of its partitions.
                await conn.execute(
                    sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)").format(
                        sql.Identifier(publication)
                    )
                )
            if not await _is_member(conn, publication, table):
                await conn.execute(
                    sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(
                        sql.Identifier(publication), name
                    )
                )
            added.append(table)
    return added


async def unpublished(
    conn: psycopg.AsyncConnection[Any], publication: str, tables: Sequence[str]
) -> list[str]:
    """Those of the tables whose changes do not come, or not under their own name."""
    query = (
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_publication_tables p ON p.schemaname = n.nspname AND p.tablename = c.relname "
        "WHERE p.pubname = %(publication)s AND c.oid = to_regclass(%(table)s)"
    )
    return [
        table
        for table in sorted(set(tables))
        if not await _rows(conn, query, publication=publication, table=_exact(conn, table))
    ]


def _exact(conn: psycopg.AsyncConnection[Any], table: str) -> str:
    return sql.Identifier(*table.split(".", 1)).as_string(conn)


async def _is_partitioned(conn: psycopg.AsyncConnection[Any], table: str) -> bool:
    query = "SELECT 1 FROM pg_class WHERE oid = to_regclass(%(table)s) AND relkind = 'p'"
    return bool(await _rows(conn, query, table=_exact(conn, table)))


async def _is_member(conn: psycopg.AsyncConnection[Any], publication: str, table: str) -> bool:
    query = (
        "SELECT 1 FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid "
        "WHERE p.pubname = %(publication)s AND r.prrelid = to_regclass(%(table)s)"
    )
    return bool(await _rows(conn, query, publication=publication, table=_exact(conn, table)))
