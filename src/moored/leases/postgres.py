"""Leases in Postgres, and fenced writes to Postgres.

A client is created from a URL: `moored.leases.connect("postgresql://app@db/orders")`. `ddl` and
`grants` return the statements to run where a service may not create tables. `fenced` protects the
data: it rejects transactions of an owner that another owner has replaced.
"""

from __future__ import annotations

from moored.kernel import Clock

from ._postgres._config import PostgresConfig
from ._postgres._fence import fenced, fenced_sync
from ._postgres._sql import ddl, grants
from ._postgres._store import PostgresStore

__all__ = ["PostgresStore", "ddl", "fenced", "fenced_sync", "grants", "open_store"]


def open_store(url: str, *, clock: Clock) -> PostgresStore:
    """Return the store of a `postgresql://` URL, not yet connected."""
    return PostgresStore(PostgresConfig.from_url(url), clock=clock)
