"""NOTIFY through a pool, whose next transaction may use another server connection."""

from __future__ import annotations

from typing import Any, cast

import psycopg

from moored.reservoir import AsyncConnectionPool

from ..server import connect, pool_by

__all__ = ["PooledPath", "notify_by", "statement"]


class PooledPath:
    """Sends notifications through a pool; from a URL it makes a small pool of its own."""

    def __init__(self, through: Any) -> None:
        self._own: AsyncConnectionPool[Any] | None = None
        if isinstance(through, str):
            through = self._own = pool_by(through, max_size=2)
        if not hasattr(through, "connection") and not hasattr(through, "acquire"):
            raise TypeError(
                f"notify_through={through!r} must be a URL, or a pool with connection() or "
                "acquire(): moored's or psycopg_pool's AsyncConnectionPool, or an asyncpg.Pool"
            )
        self._through = through

    async def open(self) -> None:
        """Open the pool, if it was made here."""
        if self._own is not None:
            await self._own.open()

    async def close(self) -> None:
        """Close the pool, if it was made here."""
        if self._own is not None:
            await self._own.close()

    async def notify(self, channel: str, payload: str, timeout: float = 30.0) -> None:
        """Send a notification in a transaction of its own; `timeout` limits the checkout."""
        asyncpg = not hasattr(self._through, "connection")
        check_out = self._through.acquire if asyncpg else self._through.connection
        async with check_out(timeout=timeout) as conn:
            await _execute(conn, statement(channel, payload))


async def notify_by(conninfo: str, channel: str, payload: str) -> None:
    """Send a notification through a connection of its own."""
    async with await connect(conninfo) as conn:
        await _execute(conn, statement(channel, payload))


async def _execute(conn: Any, sql: str) -> None:
    # asyncpg never prepares a statement without parameters; psycopg only with `prepare=True`.
    if isinstance(conn, psycopg.AsyncConnection):
        await conn.execute(cast(Any, sql), prepare=False)
    else:
        await conn.execute(sql)


def statement(channel: str, payload: str) -> str:
    """Return the SQL of a notification, valid whatever standard_conforming_strings is."""
    return f"SELECT pg_notify({_literal(channel)}, {_literal(payload)})"


def _literal(text: str) -> str:
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
