"""Writes to Postgres under a fence: an owner that has been replaced is refused.

The newest fence that a resource has seen is a row, which is compared and raised in the caller's own
transaction, and stays locked until that ends. So an older owner's transaction either ends before
the newer one begins to write, or is refused.
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
    """Let the transaction go on unless a newer fence than this one was seen for the resource.

    Call it first in the transaction that writes. `resource` names what is protected, in words of
    your own. Raises `FenceRejected` when an owner with a newer fence has been here; the
    transaction then should be rolled back, as `async with connection.transaction()` does.
    """
    _within_transaction(connection)
    statements, asked = Statements(schema), {"resource": resource, "fence": fence}
    try:
        if (await (await connection.execute(statements.guard, asked)).fetchone()) is not None:
            return
    except psycopg.errors.UndefinedTable as error:
        raise _no_table(schema) from error
    row = await (await connection.execute(statements.guarded, asked)).fetchone()
    raise FenceRejected(resource, fence=fence, seen=_number(row))


def fenced_sync(
    connection: psycopg.Connection[Any], resource: str, fence: int, *, schema: str = "moored"
) -> None:
    """The same as `fenced`, for a connection without asyncio."""
    _within_transaction(connection)
    statements, asked = Statements(schema), {"resource": resource, "fence": fence}
    try:
        if connection.execute(statements.guard, asked).fetchone() is not None:
            return
    except psycopg.errors.UndefinedTable as error:
        raise _no_table(schema) from error
    row = connection.execute(statements.guarded, asked).fetchone()
    raise FenceRejected(resource, fence=fence, seen=_number(row))


def _within_transaction(connection: psycopg.BaseConnection[Any]) -> None:
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise ValueError(
            "fenced: the connection commits each statement by itself, so the check would protect "
            "nothing; call it in the transaction that writes: async with connection.transaction()"
        )


def _no_table(schema: str) -> StoreMisconfigured:
    return StoreMisconfigured(
        f"this database has no table {schema}.guards for fences; run:\n{ddl(schema)}"
    )


def _number(row: Any) -> int:
    # The row's form is the caller's choice: a tuple, or one of the forms with names.
    return int(row["fence"] if isinstance(row, dict) else row[0])
