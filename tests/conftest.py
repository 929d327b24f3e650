"""What all tests share: a real PostgreSQL, one per worker."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from moored.embedded import SyncEmbeddedPostgres

_numbers = itertools.count(1)

# A job that a script starts in the background ignores SIGINT, one under nohup ignores SIGHUP, and
# their children inherit that; tests that send them need them as they are in a terminal.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Thousands of tests are there to stay: no garbage collector need look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[SyncEmbeddedPostgres]:
    """A running PostgreSQL for tests that do not harm it; `postgres_url` is a database in it."""
    with SyncEmbeddedPostgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database for one test, on the server that its worker has."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        yield postgres.url_of(name)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
