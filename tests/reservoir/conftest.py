"""What the tests of the reservoir share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from tests.servers import empty_database

from moored.embedded import SyncEmbeddedPostgres
from moored.testing import FaultProxy


@pytest.fixture(scope="module")
def module_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of a database for all tests of a module: making one takes longer than most tests."""
    with empty_database(postgres) as url:
        yield url


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
