"""asyncpg: connections that notice by themselves when the server hangs up."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ._driver import Driver, State

__all__ = ["AsyncpgDriver"]


class AsyncpgDriver(Driver):
    """asyncpg's connections. It has no implicit transactions, so there is nothing to commit."""

    name: ClassVar[str] = "asyncpg"
    kind: ClassVar[Literal["asyncio"]] = "asyncio"
    closes_at_once: ClassVar[bool] = True

    def clean(self, conn: Any) -> bool:
        """Whether it works and nothing is under way."""
        return not (conn.is_closed() or conn.is_in_transaction() or self._busy(conn))

    def state(self, conn: Any) -> State:
        """What it is in the middle of."""
        if conn.is_closed():
            return State.BROKEN
        if self._busy(conn):
            return State.BUSY
        return State.TRANSACTION if conn.is_in_transaction() else State.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether it was closed, by us or by the server."""
        return bool(conn.is_closed())

    def interrupted(self, error: BaseException | None) -> bool:
        """Never: a connection knows whether it is in the middle of something."""
        return False

    async def rollback(self, conn: Any) -> None:
        """Undo the transaction that somebody left open."""
        await conn.execute("ROLLBACK")

    async def ping(self, conn: Any, timeout: float) -> None:
        """Ask for a sign of life."""
        # The empty query would be shorter, but asyncpg trips over its answer.
        await conn.execute("SELECT 1", timeout=timeout)

    def close(self, conn: Any) -> None:
        """Close it at once: a farewell could wait for a server that has vanished."""
        if not conn.is_closed():
            conn.terminate()

    @staticmethod
    def _busy(conn: Any) -> bool:
        """Whether a query that was cancelled is still being cancelled on the server."""
        return bool(conn._protocol._is_cancelling())
