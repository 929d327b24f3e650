"""Type variables for the connections of a pool, which are psycopg's own by default."""

from __future__ import annotations

import sys
from typing import Any

from psycopg import AsyncConnection, Connection
from psycopg.rows import TupleRow

if sys.version_info >= (3, 13):
    from typing import TypeVar
else:
    from typing_extensions import TypeVar  # a dependency of psycopg

__all__ = ["AnyC", "AsyncC", "ThreadsC"]

AnyC = TypeVar("AnyC", default=Any)
AsyncC = TypeVar("AsyncC", default=AsyncConnection[TupleRow])
ThreadsC = TypeVar("ThreadsC", default=Connection[TupleRow])
