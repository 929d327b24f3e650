"""Long waits of a replication connection, and what counts as a sign of life."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from tests.soaking import some_of

from moored.postgres import Postgres
from moored.postgres.stream import _link, _replication
from moored.postgres.stream._link import ReplicationLink
from moored.testing import FaultProxy

from .conftest import Sql
from .server import LIMIT, following, through

pytestmark = pytest.mark.every_loop


async def test_a_command_can_be_repeated_any_number_of_times(streamed_url: str) -> None:
    link = await ReplicationLink.dial(streamed_url)
    try:
        for _ in range(12):
            assert await link.command("SELECT 1", timeout=LIMIT) == [(1,)]
    finally:
        await link.close()


@pytest.mark.parametrize("way", some_of(["line", "libpq"], "line"))
async def test_a_row_that_takes_long_to_transfer_arrives(
    streamed_url: str,
    stream_id: str,
    sql: Sql,
    tmp_path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "libpq":
        monkeypatch.setattr(_link, "STARTED", b"never so")
    monkeypatch.setattr(_replication, "SILENCE", 1.0)
    port = int(str(psycopg.conninfo.conninfo_to_dict(streamed_url)["port"]))
    async with (
        FaultProxy("127.0.0.1", port) as proxy,
        Postgres(
            through(streamed_url, proxy.port),
            stream_id=stream_id,
            state_dir=tmp_path,
            pool_size=2,
        ) as pg,
    ):
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        proxy.throttle(400_000)  # it takes longer than the allowed silence
        await sql.execute(
            "insert into orders select 1, string_agg(md5(n::text), '') "
            "from generate_series(1, 40000) n"
        )
        txn = await following(changes)
        assert [change.new and len(change.new["name"]) for change in txn] == [32 * 40_000]
        assert [e for e in pg.last_events if e.name == "connection_error"] == []
