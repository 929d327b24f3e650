"""An installed outbox in a database of its own, and an open `Outbox` on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from tests.servers import empty_database

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres.outbox import Outbox, ddl

Sql = psycopg.AsyncConnection[Any]


@pytest.fixture(scope="module")
def database(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of a database for all tests of a module: a new schema costs less than a new one."""
    with empty_database(postgres) as url:
        yield url


@pytest.fixture
def url(database: str) -> str:
    """The URL of a database with a new outbox."""
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("drop schema if exists moored, public cascade; create schema public")
        conn.execute("grant usage on schema public to public")
        conn.execute(ddl().encode())
    return database


@pytest.fixture
async def sql(url: str) -> AsyncIterator[Sql]:
    """A connection in autocommit mode."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        yield conn


@pytest.fixture
async def outbox(url: str) -> AsyncIterator[Outbox]:
    """An open outbox without a listener, so that it is polled."""
    async with Outbox(url) as outbox:
        yield outbox
