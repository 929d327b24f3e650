"""Leases in Redis, and fenced writes to Redis.

A client is created from a URL: `moored.leases.connect("redis://cache")`. `fenced` and `fenced_set`
protect the data: they reject writes of an owner that another owner has replaced.
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
    """Return the store of a `redis://`, `rediss://` or `unix://` URL, not yet connected."""
    del clock  # the scripts use the clock of the Redis server
    return RedisStore(RedisConfig.from_url(url))
