"""The pool class of SQLAlchemy engines that use a reservoir."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.pool import Pool as SqlalchemyPool

from ._item import Item
from ._pool import Pool

if TYPE_CHECKING:
    from .sqlalchemy import _Source

__all__ = ["ReservoirPool"]

log = logging.getLogger("moored.reservoir")


class ReservoirPool(SqlalchemyPool):
    """SQLAlchemy's pool of an engine whose connections come from a reservoir.

    A connection keeps its record for its whole lifetime, so that its `connect` and `close` events
    fire once. An engine keeps this pool for its whole lifetime, too: `dispose` replaces only the
    reservoir, so connections that are in use then are still known when they are closed.
    """

    def __init__(self, creator: Any, *, source: _Source[Any], **options: Any) -> None:
        super().__init__(creator, **options)
        self._source = source
        source.keeper = weakref.ref(self)
        # Not stored with the connections: the reservoir must not keep the engine alive.
        self._records: dict[int, ConnectionPoolEntry] = {}

    @property
    def _below(self) -> Pool[Any]:
        pool: Pool[Any] = self._source.pool
        return pool

    def _do_get(self) -> ConnectionPoolEntry:
        return self._source.get(self)

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if record.dbapi_connection is not None:  # else invalidated or detached
            self._source.give_back(record)

    def _close_connection(self, connection: Any, *, terminate: bool = False) -> None:
        self._source.discard(self, connection)

    def _invalidate(self, connection: Any, exception: Any = None, _checkin: bool = True) -> None:
        """Invalidate one connection, and ping the others instead of replacing them all at once."""
        self._source.ping_ready()
        if _checkin and getattr(connection, "is_valid", False):
            connection.invalidate(exception)

    def recreate(self) -> ReservoirPool:
        """Close the reservoir, and go on with a new one; called by `Engine.dispose`."""
        self.logger.info("Pool recreating")
        self._source.dispose()
        return self

    def dispose(self) -> None:
        """Do nothing: the engine also calls `recreate`, which closes the reservoir."""

    def take_record(self, item: Item[Any]) -> ConnectionPoolEntry | None:
        """Remove and return the record of a connection that is about to be closed, if it has one.

        Whoever removes a record reports the close to the listeners: SQLAlchemy, or the reservoir.
        """
        record = self._records.get(id(item.conn))
        if record is None or record.moored_origin[1] is not item:  # type: ignore[attr-defined]
            return None
        return self._records.pop(id(item.conn), None)

    def report_close(self, record: ConnectionPoolEntry) -> None:
        """Call the listeners of the `close` event."""
        if record.dbapi_connection is not None:  # else it was detached or invalidated
            self.dispatch.close(record.dbapi_connection, record)

    def report_abandoned(self, pool: Pool[Any]) -> None:
        """Report the close of connections whose event loop has ended.

        Those in use are reported by SQLAlchemy, when the garbage collector finds them.
        """
        for key, record in list(self._records.items()):
            if record.moored_origin[0] is pool and not record.in_use:  # type: ignore[attr-defined]
                del self._records[key]
                try:
                    self.report_close(record)
                except Exception as error:
                    log.error("%s: a close listener failed", pool.name, exc_info=error)

    def size(self) -> int:
        """The maximum number of connections."""
        return self._below.max_size

    def checkedin(self) -> int:
        """The number of ready connections."""
        return self._below.statistics().size

    def checkedout(self) -> int:
        """The number of connections in use."""
        return self._below.statistics().in_use

    def overflow(self) -> int:
        """Always 0: `size()` includes the overflow."""
        return 0

    def timeout(self) -> float:
        """Seconds that a caller waits for a connection."""
        return self._below.timeout

    def status(self) -> str:
        """Describe the state in one line."""
        return repr(self._below)
