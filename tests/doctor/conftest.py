"""A server that the tests of a module break and repair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres

from .world import OPTIONS, World


@pytest.fixture(
    scope="module",
    params=["installed", *(pytest.param(n, marks=pytest.mark.soak) for n in (16, 18))],
)
def server(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """The installed PostgreSQL, and those of the wheel."""
    if request.param == "installed":
        made = SyncEmbeddedPostgres(
            bin_dir=Path(require_server("postgres")).parent, options=OPTIONS
        )
    else:
        made = SyncEmbeddedPostgres(version=request.param, options=OPTIONS)
    with made:
        yield made


@pytest.fixture
def world(server: SyncEmbeddedPostgres) -> Iterator[World]:
    """A healthy database."""
    made = World(server)
    try:
        made.make_healthy()
        yield made
    finally:
        made.clean()
        made.held.close()
