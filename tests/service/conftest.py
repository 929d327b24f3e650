"""What the tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.support import Running, drop_slots, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with an embedded PostgreSQL, for tests that do not harm it."""
    with running("--data-dir", str(tmp_path_factory.mktemp("service") / "data")) as started:
        started.wait_active()
        yield started


@pytest.fixture
def postgres_url(postgres_url: str) -> Iterator[str]:
    """The same database; the slots that a service leaves there go with it."""
    yield postgres_url
    drop_slots(postgres_url)


@pytest.fixture(scope="session")
def spare_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of an embedded PostgreSQL for tests that stop or harm it, one after the other."""
    return tmp_path_factory.mktemp("spare") / "data"
