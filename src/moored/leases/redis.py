"""Leases in Redis, and writes to Redis that only the newest owner of a lease may do.

A store is opened by its URL: `moored.leases.connect("redis://cache")`. The helpers here are for
the other side, the data that a lease protects.
"""

from __future__ import annotations

from moored.kernel import Clock, extra

with extra("redis", "redis://"):
    from ._redis._config import RedisConfig
    from ._redis._fence import fenced, fenced_set, fenced_set_sync, fenced_sync
    from ._redis._store import RedisStore

__all__ = [
    "RedisStore",
    "fenced",
    "fenced_set",
    "fenced_set_sync",
    "fenced_sync",
    "open_store",
]


def open_store(url: str, *, clock: Clock) -> RedisStore:
    """The store of a `redis://`, `rediss://` or `unix://` URL, not yet connected."""
    del clock  # Redis has its own, and no other decides anything.
    return RedisStore(RedisConfig.from_url(url))
