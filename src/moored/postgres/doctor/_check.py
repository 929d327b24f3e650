"""What a check is, what it is given, and what it finds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from moored.kernel import Clock

from .._settings import Settings
from ..consume._tables import TableName
from ..server import Resolver, _admin, connect, uncancelled
from ..server._setup import quoted

__all__ = ["Check", "Connected", "Examined", "Finding", "Purpose", "Severity"]

#: Seconds for a connection; a query has `_admin.TIMEOUT`.
LIMIT = 10
#: Seconds after which an open transaction is reported.
LONG = 60.0
#: Seconds after which a transaction is reported that holds events of an outbox back.
HELD = 1.0
#: The share of the notification queue that is reported when it is in use.
QUEUE = 0.1

#: What a connection is used for: the name of its URL.
Purpose = Literal["database_url", "replication_url", "notify_url"]


class Severity(Enum):
    """How bad a finding is; the worst first."""

    #: A part of Moored does not work until it is fixed.
    STOPS = "stops"
    #: Everything works at the moment, and may fail, or harm the application, later.
    WARNS = "warns"
    #: It may be as intended.
    NOTES = "notes"


class Finding(NamedTuple):
    """A problem, and how it is fixed."""

    #: The name of the check.
    check: str
    severity: Severity
    problem: str
    #: The statements that fix it, in this order, each in a transaction of its own.
    statements: tuple[str, ...] = ()
    #: What to do after the statements, or instead if there are none.
    advice: str = ""


class Connected(NamedTuple):
    """A connection that the checks have used."""

    #: The name of its URL: `database_url`, `replication_url` or `notify_url`.
    url: str
    #: Host, port and database.
    place: str
    user: str
    #: The server's version: "17.6".
    version: str
    tls: bool
    #: The mode of a pooler in the way: "transaction" or "session".
    pooler: str | None = None

    def __str__(self) -> str:
        tls = "with TLS" if self.tls else "without TLS"
        pooler = f", through a pooler in {self.pooler} mode" if self.pooler else ""
        return (
            f"{self.url}: PostgreSQL {self.version} at {self.place} as {self.user}, {tls}{pooler}"
        )


@dataclass
class Examined:
    """One of the URLs, with a connection that is opened again when it is lost."""

    url: str
    purposes: Sequence[Purpose]
    settings: Settings
    #: Tables that should be followed.
    tables: Sequence[TableName]
    clock: Clock
    #: Whether there is a `notify_url`.
    notify_given: bool = False
    #: Its connection, once it was opened.
    connected: list[Connected] = field(default_factory=list)
    _conn: psycopg.AsyncConnection[Any] | None = None
    _resolver: Resolver = field(default_factory=lambda: Resolver(timeout=LIMIT))

    async def connect(self, **options: Any) -> psycopg.AsyncConnection[Any]:
        """Open one more connection."""
        options = {"connect_timeout": LIMIT, "application_name": "moored doctor", **options}
        url = await self._resolver.conninfo(self.url)
        return await connect(make_conninfo(url, **options))

    async def connection(self) -> psycopg.AsyncConnection[Any]:
        """Return the connection, opened again if it was lost."""
        if self._conn is None or self._conn.closed:
            self._conn = await self.connect()
            info = self._conn.info
            place = f"{info.host}:{info.port}/{info.dbname}"
            version = f"{info.server_version // 10000}.{info.server_version % 10000}"
            facts = place, info.user, version, self._conn.pgconn.ssl_in_use
            self.connected = self.connected or [Connected(self.purposes[0], *facts)]
        return self._conn

    async def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a query, which may use the names of the stream as parameters."""
        conn = await self.connection()
        values = {
            "slot": self.settings.slot_name,
            "publication": self.settings.publication_name,
            "schemas": [table.schema for table in self.tables],
            "names": [table.name for table in self.tables],
            "pool_size": self.settings.pool_size,
            "long": LONG,
            "queue": QUEUE,
        }

        async def fetch() -> list[dict[str, Any]]:
            cursor = conn.cursor(row_factory=dict_row)
            return await (await cursor.execute(query.encode(), values)).fetchall()

        return await uncancelled(conn, fetch(), _admin.TIMEOUT)

    async def close(self) -> None:
        """Close the connection."""
        if self._conn is not None:
            await self._conn.close()


class Check:
    """One question to a server: a query whose rows are problems, and the texts for a row.

    The docstring of a check says what it finds. Its texts contain the columns of the row, and
    `{user}`, `{database}`, `{publication}` and `{slot}`, quoted.
    """

    #: The name of the class, as `wal_level` for `WalLevel`.
    name: ClassVar[str]
    #: The URL that it checks; each of them, if it is None.
    purpose: ClassVar[Purpose | None] = "replication_url"
    query: ClassVar[str]
    #: The severity; a column `severity` of the query wins.
    severity: ClassVar[Severity] = Severity.STOPS
    problem: ClassVar[str]
    #: The fix; a statement that is empty for a row is left out.
    statements: ClassVar[Sequence[str]] = ()
    advice: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    async def run(self, on: Examined) -> list[Finding]:
        """Query the server, and return what is wrong."""
        info = (await on.connection()).info
        values = info.user, info.dbname, on.settings.publication_name
        texts = dict(zip(("user", "database", "publication"), map(quoted, values), strict=True))
        rows = await on.rows(self.query)
        return [self.finding(**texts, slot=on.settings.slot_name, **row) for row in rows]

    def finding(self, **row: Any) -> Finding:
        """Return the finding for a row."""
        return Finding(
            self.name,
            Severity(row.get("severity", self.severity)),
            self.problem.format_map(row),
            tuple(filter(None, (each.format_map(row) for each in self.statements))),
            self.advice.format_map(row),
        )
