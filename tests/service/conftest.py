"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.support import Running, drop_slots, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with an embedded PostgreSQL, for tests that do not change its state."""
    with running("--data-dir", str(tmp_path_factory.mktemp("service") / "data")) as started:
        started.wait_active()
        yield started


@pytest.fixture
def postgres_url(postgres_url: str) -> Iterator[str]:
    """A database of the shared server; the slots that services leave are dropped with it."""
    yield postgres_url
    drop_slots(postgres_url)


@pytest.fixture(scope="session")
def spare_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of an embedded PostgreSQL for tests that stop or kill it, one after the other."""
    return tmp_path_factory.mktemp("spare") / "data"
