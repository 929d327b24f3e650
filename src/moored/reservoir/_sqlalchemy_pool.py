"""The pool class of SQLAlchemy engines that use a reservoir."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.pool import Pool as SqlalchemyPool

from ._pool import Pool

if TYPE_CHECKING:
    from .sqlalchemy import _Source

__all__ = ["ReservoirPool"]


class ReservoirPool(SqlalchemyPool):
    """SQLAlchemy's pool of an engine whose connections come from a reservoir.

    A connection keeps its record for its whole lifetime, so that its `connect` event fires once.
    """

    def __init__(self, creator: Any, *, source: _Source[Any], **options: Any) -> None:
        super().__init__(creator, **options)
        self._source = source
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
        self._source.discard(connection)

    def _invalidate(self, connection: Any, exception: Any = None, _checkin: bool = True) -> None:
        """Invalidate one connection, and ping the others instead of replacing them all at once."""
        self._source.ping_ready()
        if _checkin and getattr(connection, "is_valid", False):
            connection.invalidate(exception)

    def recreate(self) -> ReservoirPool:
        """Close the reservoir, and return a pool with a new one; called by `Engine.dispose`."""
        self.logger.info("Pool recreating")
        self._source.dispose()
        return type(self)(
            self._creator,
            source=self._source,
            recycle=self._recycle,
            echo=self.echo,
            logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return,
            _dispatch=self.dispatch,
            dialect=self._dialect,
            pre_ping=self._pre_ping,
        )

    def dispose(self) -> None:
        """Do nothing: the engine also calls `recreate`, which closes the reservoir."""

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
