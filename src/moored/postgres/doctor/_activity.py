"""Checks of what goes on at the server: slots, locks, transactions, the notification queue."""

from __future__ import annotations

import asyncio

from moored.kernel import duration

from ..server import _admin
from ._check import Check, Examined, Finding, Severity

#: How often, and with which pause in seconds, waits are looked for that are short but many.
LOOKS, PAUSE = 10, 0.05


class SlotName(Check):
    """A slot with the name of this stream's slot that belongs to another database or plugin."""

    query = """SELECT concat_ws(' ', slot_type, plugin, database) AS what FROM pg_replication_slots
      WHERE slot_name = %(slot)s
        AND NOT coalesce(database = current_database() AND plugin = 'pgoutput', false)"""
    problem = "the slot {slot} exists, and does not belong to this stream ({what})"
    advice = "choose another stream_id, or drop that slot if nothing reads it"


class InvalidatedSlots(Check):
    """A slot that the server has invalidated: it can never be read again."""

    severity = Severity.WARNS
    query = """SELECT slot_name, quote_literal(slot_name) AS quoted,
        coalesce(to_jsonb(s) ->> 'invalidation_reason', 'its WAL was removed') AS why
      FROM pg_replication_slots s
      WHERE wal_status = 'lost' OR to_jsonb(s) ->> 'invalidation_reason' IS NOT NULL"""
    problem = "the slot {slot_name} is invalidated ({why}), and can never be read again"
    statements = ("SELECT pg_drop_replication_slot({quoted})",)
    advice = "if it is Moored's, a new one is created, and consumers get a Reset"


class RetainedWal(Check):
    """A slot that retains more WAL than `max_wal_size`, or is about to be invalidated."""

    severity = Severity.WARNS
    query = """SELECT slot_name, mb, current_setting('max_slot_wal_keep_size') AS kept, what, fix,
        CASE WHEN fix LIKE 'ALTER%%' THEN 'SELECT pg_reload_conf()' ELSE '' END AS reload
      FROM pg_replication_slots, LATERAL (SELECT ceil(pg_wal_lsn_diff(CASE
        WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
        restart_lsn) / 1048576)) AS retained (mb), LATERAL (VALUES
        ('unreserved', active, 'the next checkpoint invalidates it',
         format('ALTER SYSTEM SET max_slot_wal_keep_size = %%L', 2 * mb || 'MB')),
        ('extended', true, 'its consumer is behind', ''),
        ('extended', false, 'nothing reads it',
         format('SELECT pg_drop_replication_slot(%%L)', slot_name))
      ) AS cases (status, is_active, what, fix)
      WHERE (wal_status, active) = (status, is_active)"""
    problem = "the slot {slot_name} retains {mb} MB of WAL (max_slot_wal_keep_size {kept}): {what}"
    statements = ("{fix}", "{reload}")
    advice = "if its consumer is still needed, start it, or let it acknowledge faster"


class StuckLock(Check):
    """A backend that holds the lock of this stream, and does not stream."""

    problem = (
        "backend {pid} ({application}, for {age}) holds the lock of {slot}, and does not stream"
    )
    statements = ("SELECT pg_terminate_backend({pid})",)
    advice = "terminate that backend, unless it belongs to an instance that is just starting"

    async def run(self, on: Examined) -> list[Finding]:
        """Query the holder of the lock."""
        slot = on.settings.slot_name
        holder = await _admin.lock_holder(await on.connection(), slot)
        if holder is None or holder.streaming:
            return []
        return [self.finding(slot=slot, **{**holder._asdict(), "age": duration(holder.age)})]


class LongTransactions(Check):
    """A transaction, also a prepared one, of more than a minute: a new slot waits for its end."""

    query = """SELECT who, date_trunc('second', now() - since)::text AS age, statement,
        CASE WHEN EXISTS (SELECT 1 FROM pg_replication_slots WHERE slot_name = %(slot)s)
          THEN 'warns' ELSE 'stops' END AS severity
      FROM (
        SELECT format('the transaction of backend %%s (%%s)', pid, state), xact_start,
          format('SELECT pg_terminate_backend(%%s)', pid)
        FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND backend_type = 'client backend'
        UNION ALL SELECT format('the prepared transaction %%L of the database %%I', gid, database),
          prepared, format('ROLLBACK PREPARED %%L', gid) FROM pg_prepared_xacts
      ) AS t (who, since, statement)
      WHERE since < now() - %(long)s * interval '1 second' ORDER BY since"""
    problem = "{who} has been open for {age}: a new slot waits for its end"
    statements = ("{statement}",)
    advice = "idle_in_transaction_session_timeout and tcp_keepalives_idle end lost transactions"


class NotifyQueue(Check):
    """A notification queue that fills up: when it is full, every NOTIFY of the server fails."""

    query = """SELECT round((used * 100)::numeric) AS percent,
        CASE WHEN used < 0.5 THEN 'warns' ELSE 'stops' END AS severity, coalesce((
          SELECT format('SELECT pg_terminate_backend(%%s)', pid) FROM pg_stat_activity
          WHERE state LIKE 'idle in transaction%%' OR wait_event = 'ClientWrite'
          ORDER BY state_change LIMIT 1), '') AS statement
      FROM pg_notification_queue_usage() AS used WHERE used >= %(queue)s"""
    problem = "{percent} % of the notification queue is in use: a listener does not read"
    statements = ("{statement}",)
    advice = "the server's log names that listener, when half of the queue is in use"


class NotifyLock(Check):
    """Commits that wait for the lock of NOTIFY, of which the whole server has one."""

    severity = Severity.WARNS
    query = """SELECT count(*) AS waiting FROM pg_locks
      WHERE locktype = 'object' AND database = 0 AND classid = 'pg_database'::regclass
        AND objid = 0 AND NOT granted HAVING count(*) > 0"""
    problem = "{waiting} commits with a NOTIFY wait for each other: they are written one by one"
    advice = (
        "if they publish to an outbox, and a service has a Postgres on this database, run `moored "
        "outbox install --wake stream`; otherwise send fewer notifications"
    )

    async def run(self, on: Examined) -> list[Finding]:
        """Query the waiting commits several times: each of them waits for a moment only."""
        for _ in range(LOOKS):
            if found := await super().run(on):
                return found
            await asyncio.sleep(PAUSE)
        return []
