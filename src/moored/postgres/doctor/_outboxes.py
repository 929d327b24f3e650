"""Checks of the outboxes of a database, and of what consumers have parked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import psycopg

from .._errors import ConfigurationError
from ..outbox._reader import Reader
from ..outbox._status import held_back
from ..server import _admin, uncancelled
from . import _check
from ._check import Check, Examined, Finding, Purpose, Severity

# The schemas with a table of this name that the role may read.
_SCHEMAS = """SELECT nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
  WHERE relname = '{}' AND has_schema_privilege(n.oid, 'USAGE')
    AND has_table_privilege(c.oid, 'SELECT') ORDER BY nspname"""


class OutboxDelivery(Check):
    """An outbox that delivers nothing: a publisher stays open, or its tables are outdated."""

    purpose: ClassVar[Purpose | None] = "database_url"
    problem = "the outbox in the schema {schema}: {held}"
    statements = ("{statement}",)
    advice = (
        "or commit it, a prepared one with COMMIT PREPARED; programs should publish as late in a "
        "transaction as they can"
    )

    async def run(self, on: Examined) -> list[Finding]:
        """Look at each outbox, as its consumers do."""
        conn = await on.connection()
        outboxes = [row["schema"] for row in await on.rows(_SCHEMAS.format("outbox_state"))]
        return [each for name in outboxes for each in await self._examine(conn, name)]

    async def _examine(self, conn: psycopg.AsyncConnection[Any], schema: str) -> list[Finding]:
        found = held_back(Reader(_Only(conn), schema), show_queries=True)
        try:
            held = await uncancelled(conn, found, _admin.TIMEOUT)
        except ConfigurationError as error:
            problem, _, advice = str(error).rpartition(": ")
            return [Finding(self.name, Severity.STOPS, problem, advice=advice)]
        if held is None or held.lasted < _check.HELD:
            return []
        severity = Severity.WARNS if held.lasted < _check.LONG else Severity.STOPS
        return [self.finding(schema=schema, held=held, statement=held.statement, severity=severity)]


class _Only:
    """A connection in place of a pool."""

    def __init__(self, conn: psycopg.AsyncConnection[Any]) -> None:
        self._conn = conn

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        yield self._conn


class ParkedItems(Check):
    """Items that consumers could not handle and have parked: each waits for a decision."""

    purpose: ClassVar[Purpose | None] = "database_url"
    severity = Severity.WARNS
    query = """SELECT source, consumer, count(*) AS items,
        date_trunc('second', now() - min(parked))::text AS age
      FROM moored.parked GROUP BY source, consumer ORDER BY source, consumer"""
    problem = "parked items of the consumer {consumer} ({source}): {items}, the oldest for {age}"
    advice = (
        "see their errors with `moored consumers list`, mend the cause, and run `moored consumers "
        "retry`, or `drop`"
    )

    async def run(self, on: Examined) -> list[Finding]:
        """Query the table of parked items, if there is one."""
        schemas = [row["schema"] for row in await on.rows(_SCHEMAS.format("parked"))]
        return await super().run(on) if "moored" in schemas else []
