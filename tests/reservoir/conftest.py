"""What the tests of the reservoir share."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from psycopg import sql

from moored.embedded import SyncEmbeddedPostgres
from moored.testing import FaultProxy

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def module_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of a database for all tests of a module: making one takes longer than most tests."""
    name = f"module_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        yield postgres.url_of(name)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def observer(module_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection of its own to the module's database, which looks at what others do there."""
    with psycopg.connect(module_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def proxy(postgres: SyncEmbeddedPostgres) -> AsyncIterator[FaultProxy]:
    """A proxy before the server, on the test's own loop."""
    async with FaultProxy("127.0.0.1", postgres.port) as running:
        yield running


@pytest.fixture
def thread_proxy(postgres: SyncEmbeddedPostgres) -> Iterator[FaultProxy]:
    """A proxy before the server, in a thread of its own."""
    with FaultProxy("127.0.0.1", postgres.port).in_thread() as running:
        yield running
