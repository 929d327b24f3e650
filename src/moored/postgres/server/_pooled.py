"""A pool for a URL that may lead to a pooler in transaction mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg

from moored.kernel import SECRETS
from moored.reservoir import AsyncConnectionPool

from ._resolver import Resolver

__all__ = ["pool_by"]


def pool_by(url: str, **options: Any) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
    """Return a pool, not open, whose connections are in autocommit mode.

    They never prepare statements: behind a pooler, the next one may use another server connection.
    `options` in the URL are left out if a pooler refuses them.
    """
    SECRETS.add_from(url)
    return AsyncConnectionPool(
        partial(Resolver().conninfo, url),
        kwargs={"autocommit": True, "prepare_threshold": None},
        open=False,
        **options,
    )
