"""Finds the driver of a `connect` function, or of a first connection."""

from __future__ import annotations

import inspect
from typing import Any

from ._asyncpg import AsyncpgDriver
from ._dbapi import DbapiDriver, is_dbapi
from ._driver import Connect, Driver
from ._psycopg import driver as psycopg_driver
from ._psycopg import driver_for as psycopg_driver_for

__all__ = ["driver_of"]


def driver_of(
    connect: Connect | None,
    connection_class: type | None = None,
    *,
    asynchronous: bool,
    sample: Any = None,
) -> Driver | None:
    """Find the driver by its `connect` function, or by a first connection (`sample`).

    Return None if it can be found only by a first connection.
    """
    if connect is None:
        return psycopg_driver(connection_class, asynchronous=asynchronous)
    home = getattr(connect, "__module__", None) or ""
    if home.split(".")[0] == "asyncpg":
        return AsyncpgDriver(connect)
    if found := psycopg_driver_for(connect, sample):
        return found
    if not asynchronous and (inspect.iscoroutinefunction(connect) or inspect.isawaitable(sample)):
        raise TypeError(
            f"{connect!r} returns an awaitable, but this pool is for threads: use "
            "AsyncConnectionPool"
        )
    if sample is None:
        return None
    if type(sample).__module__.split(".")[0] == "asyncpg":
        return AsyncpgDriver(connect)
    if is_dbapi(sample):
        return DbapiDriver(connect)
    return Driver(connect)
