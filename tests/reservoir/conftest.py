"""Fixtures of the tests of the reservoir."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from tests.servers import empty_database

from moored.embedded import SyncEmbeddedPostgres
from moored.testing import FaultProxy


@pytest.fixture(scope="module")
def module_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of a database for all tests of a module: creating one is slower than most tests."""
    with empty_database(postgres) as url:
        yield url


@pytest.fixture
def observer(module_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A separate connection to the module's database, to observe the others."""
    with psycopg.connect(module_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def proxy(postgres: SyncEmbeddedPostgres) -> AsyncIterator[FaultProxy]:
    """A proxy in front of the server, on the test's own loop."""
    async with FaultProxy("127.0.0.1", postgres.port) as running:
        yield running


@pytest.fixture
def thread_proxy(postgres: SyncEmbeddedPostgres) -> Iterator[FaultProxy]:
    """A proxy in front of the server, in its own thread."""
    with FaultProxy("127.0.0.1", postgres.port).in_thread() as running:
        yield running
