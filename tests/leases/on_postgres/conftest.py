"""Stores in Postgres: near, far, and for a role that may do nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from psycopg import sql
from tests.leases.on_postgres.support import PATIENCE, Database

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Clock
from moored.leases.postgres import PostgresStore
from moored.leases.postgres import open_store as open_postgres
from moored.testing.proxy import FaultProxy


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    """The superuser's view of the test's database."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    opened = open_postgres(postgres_url, clock=Clock.current())
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def proxy(postgres: SyncEmbeddedPostgres) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", postgres.port) as running:
        yield running


@pytest.fixture
async def far_store(
    proxy: FaultProxy, postgres: SyncEmbeddedPostgres, postgres_url: str
) -> AsyncIterator[PostgresStore]:
    """A store behind a proxy, with little patience."""
    url = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
    opened = open_postgres(f"{url}?timeout={PATIENCE}", clock=Clock.current())
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def role(database: Database, postgres_url: str) -> Iterator[str]:
    """The URL for a role that may connect, and nothing else."""
    name = f"app_{database.info.dbname}"
    named = sql.Identifier(name)
    database.execute(sql.SQL("create role {} login password 'pw'").format(named))
    yield postgres_url.replace(f"//{database.info.user}:{database.info.password}@", f"//{name}:pw@")
    database.execute(sql.SQL("drop owned by {}").format(named))
    database.execute(sql.SQL("drop role {}").format(named))
