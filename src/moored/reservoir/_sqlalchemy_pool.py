"""A reservoir, as SQLAlchemy sees it."""

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

    A connection has the same record as long as it lives, so events and adapters see it once.
    """

    def __init__(self, creator: Any, *, source: _Source[Any], **options: Any) -> None:
        super().__init__(creator, **options)
        self._source = source
        # Here, and not with the connections: the reservoir must not hold on to the engine.
        self._records: dict[int, ConnectionPoolEntry] = {}

    @property
    def _below(self) -> Pool[Any]:
        pool: Pool[Any] = self._source.pool
        return pool

    def _do_get(self) -> ConnectionPoolEntry:
        return self._source.get(self)

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if record.dbapi_connection is not None:  # else it was invalidated, or detached
            self._source.give_back(record)

    def _close_connection(self, connection: Any, *, terminate: bool = False) -> None:
        self._source.discard(connection)

    def _invalidate(self, connection: Any, exception: Any = None, _checkin: bool = True) -> None:
        """One lost connection says nothing of the others, and to replace them all at once is what a
        reservoir is there to avoid: they are asked for a sign of life."""
        self._source.suspect_all()
        if _checkin and getattr(connection, "is_valid", False):
            connection.invalidate(exception)

    def recreate(self) -> ReservoirPool:
        """Close the reservoir, and return a pool with a new one: an engine's `dispose` calls it."""
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
        """Nothing: an engine calls `recreate` besides, which closes the reservoir."""

    def size(self) -> int:
        """How many connections there may be."""
        return self._below.max_size

    def checkedin(self) -> int:
        """How many connections are ready."""
        return self._below.statistics().size

    def checkedout(self) -> int:
        """How many connections are in use."""
        return self._below.statistics().in_use

    def overflow(self) -> int:
        """None: the reservoir keeps as many as there may be."""
        return 0

    def timeout(self) -> float:
        """How long a caller waits for a connection."""
        return self._below.timeout

    def status(self) -> str:
        """The state in one line."""
        return repr(self._below)
