"""A database for each test, whose slots are dropped with it, and a manager for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
def streamed_url(postgres_url: str, stream_id: str) -> Iterator[str]:
    """The URL of an empty database; what was made for replication is dropped at the end."""
    yield postgres_url
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        ends = time.monotonic() + 30.0
        # A sender that was ended has its slot for a moment more.
        while _drop_slots(conn) and time.monotonic() < ends:
            time.sleep(0.05)


def _drop_slots(conn: psycopg.Connection[Any]) -> bool:
    """Drop what can be dropped; returns whether something is left."""
    conn.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots "
        "where database = current_database() and active_pid is not null"
    )
    conn.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots "
        "where database = current_database() and active_pid is null"
    )
    query = "select 1 from pg_replication_slots where database = current_database()"
    return conn.execute(query).fetchone() is not None


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
