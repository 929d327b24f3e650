"""Fixtures of the command's tests: a running service, and a directory without configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.support import Running, running

from moored.embedded import SyncEmbeddedPostgres


@pytest.fixture(scope="session")
def service(postgres: SyncEmbeddedPostgres) -> Iterator[Running]:
    """A running service, for tests that only query it."""
    with running("--database-url", postgres.url) as started:
        started.wait_active()
        yield started


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory and an environment without any configuration."""
    for name in list(os.environ):
        if name.startswith("MOORED_") or name == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path
