"""Checks of the server: version, role in a cluster, settings, and what is left of its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ._check import Check, Examined, Finding, Severity


class KnownProblem(NamedTuple):
    """A bug of PostgreSQL that affects Moored."""

    text: str
    #: The first minor version without it, by major version; later major versions never had it.
    mended: Mapping[int, int]

    def mended_in(self, version: int) -> str | None:
        """Return the first version without the problem; None if this one does not have it."""
        major, minor = divmod(version, 10000)
        if major > max(self.mended) or minor >= self.mended.get(major, 10000):
            return None
        newer = major if major in self.mended else min(self.mended)
        return f"{newer}.{self.mended[newer]}"


KNOWN_PROBLEMS = [
    # The first version that has pg_replication_slots.wal_status.
    KnownProblem("it is too old for Moored", {13: 0}),
    KnownProblem(
        "logical decoding may lose changes of a transaction that is open while a table is added to "
        "a publication, run out of memory, or wait forever after a crash of the server",
        {17: 6, 16: 10, 15: 14, 14: 19, 13: 22},
    ),
    KnownProblem(
        'LISTEN may fail with "could not access status of transaction" after a VACUUM',
        {18: 2, 17: 8, 16: 12, 15: 16, 14: 21},
    ),
]


class ServerVersion(Check):
    """A version of PostgreSQL with a bug that affects Moored."""

    purpose = None
    severity = Severity.WARNS
    problem = "PostgreSQL {version}: {text}"
    advice = "upgrade to {mended} or newer"

    async def run(self, on: Examined) -> list[Finding]:
        """Compare the version with the known problems."""
        number = (await on.connection()).info.server_version
        version = f"{number // 10000}.{number % 10000}"
        known = [(each.text, each.mended_in(number)) for each in KNOWN_PROBLEMS]
        return [self.finding(version=version, text=t, mended=m) for t, m in known if m]


class Standby(Check):
    """A standby: publications, slots and locks are made on the primary."""

    query = "SELECT WHERE pg_is_in_recovery()"
    problem = "the server is a standby"
    advice = "set the URL to the primary; if it has several hosts, add target_session_attrs=primary"


class WalLevel(Check):
    """A `wal_level` below logical."""

    query = "SELECT setting FROM pg_settings WHERE name = 'wal_level' AND setting <> 'logical'"
    problem = "wal_level is {setting}, not logical"
    statements = ("ALTER SYSTEM SET wal_level = 'logical'",)
    advice = "restart the server (on RDS, set rds.logical_replication = 1 instead)"


class SlotsLeft(Check):
    """No replication slot left for this stream."""

    query = """SELECT count(*) AS used, 2 * count(*) + 1 AS more FROM pg_replication_slots
      HAVING count(*) >= current_setting('max_replication_slots')::int
        AND NOT coalesce(bool_or(slot_name = %(slot)s), false)"""
    problem = "all {used} replication slots of the server are in use"
    statements = ("ALTER SYSTEM SET max_replication_slots = {more}",)
    advice = "restart the server; or drop a slot that nothing reads"


class SendersLeft(Check):
    """No WAL sender left for this stream."""

    query = """SELECT count(*) AS used, 2 * count(*) + 1 AS more FROM pg_stat_replication
      WHERE application_name IS DISTINCT FROM 'moored doctor'
      HAVING count(*) >= current_setting('max_wal_senders')::int
        AND NOT EXISTS (SELECT 1 FROM pg_replication_slots WHERE slot_name = %(slot)s AND active)"""
    problem = "all {used} WAL senders of the server are in use"
    statements = ("ALTER SYSTEM SET max_wal_senders = {more}",)
    advice = "restart the server"


class ConnectionsLeft(Check):
    """Fewer connections left for the pools than they need: of the server, or of the role."""

    # Beside its pools, an instance has a stream and a listener; what it has already counts.
    query = """SELECT whose, most, most - used AS left, needed, statement, advice
      FROM (SELECT %(pool_size)s + 2 - count(*) AS needed FROM pg_stat_activity
        WHERE application_name LIKE 'moored%%' AND application_name <> 'moored doctor') AS n,
      LATERAL (
        SELECT 'server', setting::int - current_setting('superuser_reserved_connections')::int,
          (SELECT sum(numbackends) FROM pg_stat_database), 'restart the server',
          format('ALTER SYSTEM SET max_connections = %%s', setting::int + needed)
        FROM pg_settings WHERE name = 'max_connections'
        UNION ALL SELECT 'role', rolconnlimit,
          (SELECT count(*) FROM pg_stat_activity WHERE usesysid = pg_roles.oid), '',
          format('ALTER ROLE %%I CONNECTION LIMIT -1', rolname)
        FROM pg_roles WHERE rolname = current_user AND NOT rolsuper AND rolconnlimit >= 0
      ) AS limits (whose, most, used, advice, statement) WHERE most - used < needed"""
    problem = "{left} of {most} connections of the {whose} are left, and {needed} are needed"
    statements = ("{statement}",)
    advice = "{advice}"


class HarmfulSettings(Check):
    """A setting that makes sessions read-only, closes idle ones, or keeps those of lost clients."""

    purpose = None
    query = """SELECT name, setting, severity, harm, good, write FROM pg_settings JOIN (VALUES
        ('default_transaction_read_only', '^on$', 'off', 'stops',
         'publications cannot be created, and an outbox cannot be written to',
         'SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE'),
        ('idle_session_timeout', '[1-9]', '0', 'warns',
         'the server closes connections that are idle for so many milliseconds', ''),
        ('wal_sender_timeout', '^0$', '60s', 'warns',
         'an instance whose machine is lost keeps the lock and the slot until the server ends', '')
      ) AS harmful (name, bad, good, severity, harm, write) USING (name) WHERE setting ~ bad"""
    problem = "{name} is {setting}: {harm}"
    statements = ("{write}", "ALTER ROLE {user} IN DATABASE {database} SET {name} = '{good}'")
    advice = "if the URL sets {name} by its `options`, remove it there instead"
