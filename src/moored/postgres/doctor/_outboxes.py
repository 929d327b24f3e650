"""Checks of the outboxes of a database, and of what consumers have parked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import psycopg

from .._errors import ConfigurationError
from ..outbox._reader import Reader
from ..outbox._status import HeldBack, held_back
from ..server import _admin, uncancelled
from . import _check
from ._check import Check, Examined, Finding, Purpose, Severity

# The schemas with the tables of an outbox, of any version, that the role may read. An application
# may have a table that is called like one of them.
_OUTBOXES = """SELECT nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
  JOIN pg_class o ON o.relnamespace = n.oid AND o.relname = 'outbox' AND o.relkind = 'p'
  WHERE c.relname = 'outbox_state' AND has_schema_privilege(n.oid, 'USAGE')
    AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(o.oid, 'SELECT')
    AND (SELECT count(*) FROM pg_attribute WHERE attrelid = c.oid
         AND attname IN ('version', 'single')) = 2
  ORDER BY nspname"""
_MAY_READ_PARKED = """SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
  WHERE nspname = 'moored' AND relname = 'parked' AND has_schema_privilege(n.oid, 'USAGE')
    AND has_table_privilege(c.oid, 'SELECT')"""


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
        outboxes = [row["schema"] for row in await on.rows(_OUTBOXES)]
        return [each for name in outboxes for each in await self._examine(conn, name)]

    async def _examine(self, conn: psycopg.AsyncConnection[Any], schema: str) -> list[Finding]:
        reader = Reader(_Only(conn), schema)
        try:
            held = await _held_back(conn, reader)
            if held is not None and held.lasted >= _check.HELD:
                # A new reader does not know which ids the open publishers were given: one that
                # stays open is told from one that has begun to publish just now.
                await asyncio.sleep(_check.HELD)
                held = await _held_back(conn, reader)
        except ConfigurationError as error:
            problem, _, advice = str(error).rpartition(": ")
            return [Finding(self.name, Severity.STOPS, problem, advice=advice)]
        if held is None or held.lasted < _check.HELD:
            return []
        severity = Severity.WARNS if held.lasted < _check.LONG else Severity.STOPS
        return [self.finding(schema=schema, held=held, statement=held.statement, severity=severity)]


async def _held_back(conn: psycopg.AsyncConnection[Any], reader: Reader) -> HeldBack | None:
    return await uncancelled(conn, held_back(reader, show_queries=True), _admin.TIMEOUT)


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
        return await super().run(on) if await on.rows(_MAY_READ_PARKED) else []
