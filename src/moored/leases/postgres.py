"""Leases in Postgres, and writes to Postgres that only the newest owner of a lease may do.

A store is opened by its URL: `moored.leases.connect("postgresql://app@db/orders")`. `ddl` and
`grants` are for those who do not let a service make tables; `fenced` is for the other side, the
data that a lease protects.
"""

from __future__ import annotations

from moored.kernel import Clock

from ._postgres._config import PostgresConfig
from ._postgres._fence import fenced, fenced_sync
from ._postgres._sql import ddl, grants
from ._postgres._store import PostgresStore

__all__ = ["PostgresStore", "ddl", "fenced", "fenced_sync", "grants", "open_store"]


def open_store(url: str, *, clock: Clock) -> PostgresStore:
    """The store of a `postgresql://` URL, not yet connected."""
    return PostgresStore(PostgresConfig.from_url(url), clock=clock)
