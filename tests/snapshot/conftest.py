"""A database for each test, and a server of an older version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.postgres.conftest import make, stream_id, streamed_url
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres

__all__ = ["make", "older_postgres", "stream_id", "streamed_url"]


@pytest.fixture(scope="module")
def older_postgres() -> Iterator[SyncEmbeddedPostgres]:
    """An installed server: 15 on Debian 12."""
    with SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent) as server:
        yield server
