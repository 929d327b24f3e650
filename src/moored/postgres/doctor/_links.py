"""Checks of the way to the server: name, port, password, TLS, poolers, replication, clocks."""

from __future__ import annotations

from ipaddress import ip_address
from typing import ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from moored.kernel import duration

from .._errors import PostgresError
from ..server import _admin, diagnose
from ..server._setup import quoted
from ._check import Check, Examined, Finding, Purpose, Severity

#: What a connection attempt or a query raises.
ERRORS = (psycopg.Error, PostgresError, OSError)
#: A difference of clocks that is reported, in seconds.
SKEW = 5.0

_PID = "SELECT pg_catalog.pg_backend_pid() AS pid"


class Reachability(Check):
    """A URL that leads to no database: wrong syntax, host, port, password or database name."""

    purpose: ClassVar[Purpose | None] = None
    problem, statements, advice = "{message}", ("{create}",), "{remedy}"
    #: Types of errors that other checks report, with their statements.
    others: ClassVar[tuple[str, ...]] = ()

    async def run(self, on: Examined) -> list[Finding]:
        """Open a connection."""
        try:
            await self.attempt(on)
        except ERRORS as error:
            found, create = diagnose(error), ""
            if found.type == "database_does_not_exist":
                known = conninfo_to_dict(on.url)
                create = f"CREATE DATABASE {quoted(str(known.get('dbname') or known.get('user')))}"
            if found.type not in self.others:
                return [self.finding(message=found.message, remedy=found.remedy, create=create)]
        return []

    async def attempt(self, on: Examined) -> None:
        """Open the connection of all other checks."""
        await on.connection()


class ReplicationConnection(Reachability):
    """A URL for replication that leads to a pooler, or that the server refuses."""

    purpose = "replication_url"
    others = ("insufficient_privileges", "insufficient_resources")

    async def attempt(self, on: Examined) -> None:
        """Open a replication connection."""
        async with await on.connect(replication="database") as conn:
            await _admin.rows(conn, "IDENTIFY_SYSTEM")


class Encryption(Check):
    """A connection to another machine without TLS."""

    purpose = None
    severity = Severity.WARNS
    problem = "the connection is not encrypted: passwords and data can be read on the network"
    advice = "set sslmode=require or verify-full in the URL; the server needs a certificate"

    async def run(self, on: Examined) -> list[Finding]:
        """Look at the connection."""
        conn = await on.connection()
        local = not conn.info.hostaddr or ip_address(conn.info.hostaddr).is_loopback
        return [] if local or conn.pgconn.ssl_in_use else [self.finding()]


class Pooler(Check):
    """A pooler at the URL of the listener: in transaction mode it loses notifications."""

    purpose = None
    problem = "the URL leads to a pooler in {mode} mode, {harm}"
    advice = "set notify_url to the server itself (by convention port 5432 instead of 6432)"

    async def run(self, on: Examined) -> list[Finding]:
        """Compare the backends that answer."""
        conn = await on.connection()
        if (await on.rows(_PID))[0]["pid"] == conn.pgconn.backend_pid:
            return []
        mode = await _pooler_mode(on)
        on.connected = [each._replace(pooler=mode) for each in on.connected]
        severity, harm = Severity.WARNS, "so there is no listener"
        if on.notify_given and mode == "session":
            harm = "where a listener occupies a server connection"
        elif on.notify_given:
            severity, harm = Severity.STOPS, "which loses notifications, or misdelivers them"
        listens = "notify_url" in on.purposes
        return [self.finding(mode=mode, harm=harm, severity=severity)] if listens else []


async def _pooler_mode(on: Examined) -> str:
    """Return "transaction" if the pooler shares server connections between its clients.

    In session mode a client keeps its server connection. In transaction mode it sees different
    ones, or the one that another client has just used.
    """
    own: set[int] = set()
    others: set[int] = set()
    async with await on.connect() as other:
        for _ in range(5):
            own.add((await on.rows(_PID))[0]["pid"])
            try:
                others.add((await _admin.rows(other, _PID))[0][0])
            except TimeoutError:
                break  # in session mode, the pool may have no second server connection
            if len(own) > 1 or own & others:
                return "transaction"
    return "session"


class ClockSkew(Check):
    """Clocks of this machine and the server that differ: lag and ages are wrong by as much."""

    severity = Severity.WARNS
    query = "SELECT extract(epoch FROM clock_timestamp())::float AS time"
    problem = "the server's clock is {skew} {which} the clock here"
    advice = "synchronize both clocks, by NTP"

    async def run(self, on: Examined) -> list[Finding]:
        """Compare the clocks; the duration of the query is tolerated."""
        before = on.clock.wall()
        server = (await on.rows(self.query))[0]["time"]
        skew = max(before - server, server - on.clock.wall())
        which = "behind" if server < before else "ahead of"
        return [self.finding(skew=duration(skew), which=which)] if skew > SKEW else []
