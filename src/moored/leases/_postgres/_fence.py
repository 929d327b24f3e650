"""Fenced writes to Postgres: transactions of an owner that was replaced are rejected.

The newest fence of a resource is a row. It is compared and updated in the caller's transaction, and
stays locked until that ends. So an older owner's transaction either ends before the newer owner's
first write, or is rejected.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from .._errors import FenceRejected, StoreMisconfigured
from ._sql import Statements, ddl

__all__ = ["fenced", "fenced_sync"]


async def fenced(
    connection: psycopg.AsyncConnection[Any], resource: str, fence: int, *, schema: str = "moored"
) -> None:
    """Raise `FenceRejected` if the resource has seen a newer fence; else record this one.

    Call it first in the transaction that writes. `resource` is a name of your choice for what is
    protected. After `FenceRejected` the transaction should be rolled back, as
    `async with connection.transaction()` does.
    """
    _within_transaction(connection)
    statements, parameters = Statements(schema), {"resource": resource, "fence": fence}
    try:
        if (await (await connection.execute(statements.guard, parameters)).fetchone()) is not None:
            return
    except psycopg.errors.UndefinedTable as error:
        raise _no_table(schema) from error
    row = await (await connection.execute(statements.guarded, parameters)).fetchone()
    raise FenceRejected(resource, fence=fence, seen=_number(row))


def fenced_sync(
    connection: psycopg.Connection[Any], resource: str, fence: int, *, schema: str = "moored"
) -> None:
    """The same as `fenced`, for a connection without asyncio."""
    _within_transaction(connection)
    statements, parameters = Statements(schema), {"resource": resource, "fence": fence}
    try:
        if connection.execute(statements.guard, parameters).fetchone() is not None:
            return
    except psycopg.errors.UndefinedTable as error:
        raise _no_table(schema) from error
    row = connection.execute(statements.guarded, parameters).fetchone()
    raise FenceRejected(resource, fence=fence, seen=_number(row))


def _within_transaction(connection: psycopg.BaseConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise ValueError(
            "fenced: the connection is in autocommit mode, so the check would protect nothing; "
            "call it in the transaction that writes: async with connection.transaction()"
        )


def _no_table(schema: str) -> StoreMisconfigured:
    return StoreMisconfigured(
        f"this database has no table {schema}.guards, which stores fences; run:\n{ddl(schema)}"
    )


def _number(row: Any) -> int:
    # The connection's row factory decides whether the row is a tuple or a dict.
    return int(row["fence"] if isinstance(row, dict) else row[0])
