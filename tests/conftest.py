"""What all tests share: a real PostgreSQL, one per worker."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from tests.initdb_once import initdb_once
from tests.servers import empty_database

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import SECRETS

# A job that a script starts in the background ignores SIGINT, one under nohup ignores SIGHUP, and
# their children inherit that; tests that send them need them as they are in a terminal.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Thousands of tests are there to stay: no garbage collector need look at them each time."""
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `every_loop` run once on asyncio's own event loop and once on uvloop."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop
    }
    if item.get_closest_marker("every_loop") is not None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture(autouse=True)
def _forget_secrets() -> Iterator[None]:
    """A password that one test makes up is an ordinary word in another."""
    yield
    SECRETS.clear()


@pytest.fixture(scope="session", autouse=True)
def _initdb_once() -> Iterator[None]:
    with initdb_once():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[SyncEmbeddedPostgres]:
    """A running PostgreSQL for tests that do not harm it; `postgres_url` is a database in it."""
    with SyncEmbeddedPostgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database for one test, on the server that its worker has."""
    with empty_database(postgres) as url:
        yield url
