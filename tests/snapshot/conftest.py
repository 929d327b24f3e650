"""A database for each test, and servers of older versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.postgres.conftest import make, stream_id, streamed_url
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres

__all__ = ["make", "older_postgres", "stream_id", "streamed_url"]


@pytest.fixture(scope="module", params=["installed", pytest.param(16, marks=pytest.mark.soak)])
def older_postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """An installed server, 15 on Debian 12, and in `make soak` also 16."""
    if request.param == "installed":
        made = SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent)
    else:
        made = SyncEmbeddedPostgres(version=request.param)
    with made:
        yield made
