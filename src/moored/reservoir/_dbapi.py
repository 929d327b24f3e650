"""The driver for any module of the Python Database API (PEP 249)."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any, ClassVar, Literal

from ._driver import Driver, DriverState
from ._sqlstate import sqlstate_of

__all__ = ["DbapiDriver", "is_dbapi"]

#: Prefixes of the SQLSTATEs of a lost connection: connection exceptions, and shutdown.
_LOST = ("08", "57P")
#: The errors that may mean a lost connection; PEP 249 has no error for exactly that.
_DOUBTFUL = ("OperationalError", "InterfaceError", "InternalError")


def is_dbapi(conn: Any) -> bool:
    """Whether a connection has the methods of PEP 249, as plain functions."""
    methods = [getattr(conn, name, None) for name in ("cursor", "commit", "rollback")]
    return all(callable(method) and not iscoroutinefunction(method) for method in methods)


class DbapiDriver(Driver):
    """The driver for connections of PEP 249.

    They do not report whether a transaction is open, so every checkout ends with a commit or a
    rollback; most drivers do that without a round trip if no transaction is open.
    """

    name: ClassVar[str] = "DB-API"
    kind: ClassVar[Literal["threads"]] = "threads"
    knows_state: ClassVar[bool] = False

    def clean(self, conn: Any) -> bool:
        """False: the state is never known for certain."""
        return False

    def state(self, conn: Any) -> DriverState:
        """Assume an open transaction unless the connection says otherwise."""
        try:
            open_one = getattr(conn, "in_transaction", True)
        except Exception:
            return DriverState.BROKEN  # a closed connection of sqlite3
        if self.is_broken(conn):
            return DriverState.BROKEN
        return DriverState.TRANSACTION if open_one else DriverState.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether its `closed` attribute is true; psycopg2's is a number."""
        closed = getattr(conn, "closed", False)
        return bool(closed) if isinstance(closed, bool | int) else False

    def needs_ping(self, conn: Any, error: BaseException) -> bool:
        """Whether the error may mean a lost connection; any error, if there is no `closed`."""
        if not hasattr(conn, "closed") or (sqlstate_of(error) or "").startswith(_LOST):
            return True
        return any(kind.__name__ in _DOUBTFUL for kind in type(error).__mro__)

    def commit(self, conn: Any) -> None:
        """Commit the transaction."""
        conn.commit()

    def rollback(self, conn: Any, timeout: float) -> None:
        """Roll back the transaction; the timeout is up to the driver's own settings."""
        conn.rollback()

    def ping(self, conn: Any, timeout: float) -> None:
        """Run `SELECT 1`; the timeout is up to the driver's own settings."""
        cursor = conn.cursor()
        try:
            cursor.execute("SELECT 1")
            cursor.fetchall()
        finally:
            cursor.close()
        conn.rollback()
