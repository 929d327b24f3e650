"""A database for each test, whose slots are dropped with it, and a manager for it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from moored.postgres import Postgres

_numbers = itertools.count(1)

Sql = psycopg.AsyncConnection[Any]
MakePostgres = Callable[..., Postgres]


@pytest.fixture
def stream_id() -> str:
    """A name of its own: slots are of the whole server, not of a database."""
    return f"test_{next(_numbers)}"


@pytest.fixture
def streamed_url(postgres_url: str) -> str:
    """The URL of an empty database; what was made for replication is dropped at the end."""
    return postgres_url


@pytest.fixture
async def sql(streamed_url: str) -> AsyncIterator[Sql]:
    """A connection of the test's own, with a table to write to."""
    async with await psycopg.AsyncConnection.connect(streamed_url, autocommit=True) as conn:
        await conn.execute("create table orders (id int primary key, name text)")
        yield conn


@pytest.fixture
def make(streamed_url: str, stream_id: str, tmp_path: Path) -> MakePostgres:
    """Makes a manager on the test's database; the same state each time."""

    def made(**options: Any) -> Postgres:
        options = {"pool_size": 2, "state_dir": tmp_path, "stream_id": stream_id, **options}
        return Postgres(streamed_url, **options)

    return made
