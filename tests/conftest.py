"""Fixtures of all tests: a real PostgreSQL per worker, and clean global state."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from hypothesis.internal import charmap
from hypothesis.internal.intervalsets import IntervalSet
from tests.initdb_once import initdb_once, pytest_configure, pytest_unconfigure
from tests.servers import Databases
from tests.workers import pytest_addoption, pytest_runtestloop

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import SECRETS
from moored.testing import scaled

__all__ = [
    "pytest_addoption",
    "pytest_configure",
    "pytest_runtestloop",
    "pytest_unconfigure",
]

# A background job of a script ignores SIGINT, a job under nohup ignores SIGHUP, and child processes
# inherit that; tests that send these signals need the handlers of a terminal.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A limit of time for examples would fail on a busy machine.
settings.register_profile(
    "moored",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=scaled(100, least=15),
)
settings.load_profile("moored")


# In a new checkout Hypothesis would try for 4 s which of all code points UTF-8 can encode.
_codec = charmap.intervals_from_codec
_utf_8 = IntervalSet([(0, 0xD7FF), (0xE000, sys.maxunicode)]), IntervalSet([])
charmap.intervals_from_codec = cache(lambda name: _utf_8 if name == "utf-8" else _codec(name))


# Garbage collections take a quarter of the time of importing and collecting the tests.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest test first: at the end, the other workers would wait for it."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/soak_app/"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Enable garbage collections, and exclude the collected tests from them, to save time.

    A collection of everything takes half a second. A simulation freezes the existing objects too,
    and its `gc.unfreeze()` would include the collected tests again: here it has no effect. So that
    no garbage is frozen, and its errors lost, a collection comes before each freeze.
    """
    freeze = gc.freeze
    freeze()
    gc.enable()

    def collect_and_freeze() -> None:
        gc.collect()
        freeze()

    gc.freeze = collect_and_freeze
    gc.unfreeze = lambda: None
    if session.config.option.workers > 1 and "tests.programs" in sys.modules:
        sys.modules["tests.programs"].share_imports()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests marked `every_loop` on asyncio's event loop and on uvloop.

    Below full scale each test runs on one of them, half of the tests on uvloop, except those marked
    `every_loop(always=True)`.
    """
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    mark = item.get_closest_marker("every_loop")
    if mark is None:
        return {"asyncio": factories["asyncio"]}
    if mark.kwargs.get("always") or scaled(100) >= 100:
        return factories
    chosen = "uvloop" if zlib.crc32(item.nodeid.encode()) % 2 else "asyncio"
    return {chosen: factories[chosen]}


@pytest.fixture(autouse=True)
def _forget_secrets() -> Iterator[None]:
    """Forget the passwords of one test, which may be ordinary words in another."""
    yield
    SECRETS.clear()


@pytest.fixture(scope="session", autouse=True)
def _initdb_once() -> Iterator[None]:
    with initdb_once():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[SyncEmbeddedPostgres]:
    """A running PostgreSQL for tests that leave it intact; see also `postgres_url`.

    Without autovacuum, whose transactions may hold back the events of an outbox for a moment.
    """
    with SyncEmbeddedPostgres(options={"autovacuum": "off"}) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: SyncEmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database for one test, on the server of the worker."""
    with Databases.of(postgres).empty() as url:
        yield url
