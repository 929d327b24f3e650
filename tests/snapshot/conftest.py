"""A database for each test, and servers of older versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.postgres.conftest import Sql, make, stream_id, streamed_url
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres

from .orders import CREATE

__all__ = ["make", "older_postgres", "sql", "stream_id", "streamed_url"]


@pytest.fixture
async def sql(streamed_url: str) -> AsyncIterator[Sql]:
    """A connection of the test's own, and the table `orders`."""
    async with await psycopg.AsyncConnection.connect(streamed_url, autocommit=True) as conn:
        await conn.execute(CREATE.encode())
        yield conn


@pytest.fixture(scope="module", params=["installed", pytest.param(16, marks=pytest.mark.soak)])
def older_postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """An installed server, 15 on Debian 12, and in `make soak` also 16."""
    if request.param == "installed":
        made = SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent)
    else:
        made = SyncEmbeddedPostgres(version=request.param)
    with made:
        yield made
