"""Any driver of the Python Database API (PEP 249): it says little, so it is asked more often."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any, ClassVar, Literal

from ._driver import Driver, DriverState
from ._sqlstate import sqlstate_of

__all__ = ["DbapiDriver", "fits"]

#: The SQLSTATEs with which a server says farewell: shut down, or terminated.
_LOST = ("08", "57P")
#: The errors that may mean that the connection is lost; PEP 249 has no name for just that.
_DOUBTFUL = ("OperationalError", "InterfaceError", "InternalError")


def fits(conn: Any) -> bool:
    """Whether a connection is one of PEP 249, whose methods are not awaited."""
    methods = [getattr(conn, name, None) for name in ("cursor", "commit", "rollback")]
    return all(callable(method) and not iscoroutinefunction(method) for method in methods)


class DbapiDriver(Driver):
    """Connections of PEP 249. Whether a transaction is open cannot be asked, so every checkout
    ends with a commit or a rollback, as most of them do it: without a round trip when idle."""

    name: ClassVar[str] = "DB-API"
    kind: ClassVar[Literal["threads"]] = "threads"
    knows_state: ClassVar[bool] = False

    def clean(self, conn: Any) -> bool:
        """Never known for certain."""
        return False

    def state(self, conn: Any) -> DriverState:
        """Assume the worst, short of a broken connection."""
        try:
            open_one = getattr(conn, "in_transaction", True)
        except Exception:
            return DriverState.BROKEN  # sqlite3's way to say that it was closed
        if self.is_broken(conn):
            return DriverState.BROKEN
        return DriverState.TRANSACTION if open_one else DriverState.IDLE

    def is_broken(self, conn: Any) -> bool:
        """Whether it says so itself; psycopg2 has a number there."""
        closed = getattr(conn, "closed", False)
        return bool(closed) if isinstance(closed, bool | int) else False

    def suspects(self, conn: Any, error: BaseException) -> bool:
        """Whether the error is of a kind that a lost connection gives; one that cannot even say
        that somebody has closed it is asked after every error."""
        if not hasattr(conn, "closed") or (sqlstate_of(error) or "").startswith(_LOST):
            return True
        return any(kind.__name__ in _DOUBTFUL for kind in type(error).__mro__)

    def commit(self, conn: Any) -> None:
        """End its transaction."""
        conn.commit()

    def rollback(self, conn: Any, timeout: float) -> None:
        """Undo its transaction; how long that may take is up to the driver's own settings."""
        conn.rollback()

    def ping(self, conn: Any, timeout: float) -> None:
        """Ask for a number; how long that may take is up to the driver's own settings."""
        cursor = conn.cursor()
        try:
            cursor.execute("SELECT 1")
            cursor.fetchall()
        finally:
            cursor.close()
        conn.rollback()

    def close(self, conn: Any) -> None:
        """Close it."""
        conn.close()
