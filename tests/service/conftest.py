"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.support import Running, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with an embedded PostgreSQL, for tests that do not change its state."""
    with running("--data-dir", str(tmp_path_factory.mktemp("service") / "data")) as started:
        started.wait_active()
        yield started


@pytest.fixture(scope="session")
def spare_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of an embedded PostgreSQL for tests that stop or kill it, one after the other."""
    return tmp_path_factory.mktemp("spare") / "data"
