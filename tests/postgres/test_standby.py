"""An instance that waits for the lock of its stream: what works there, and what it reports."""

from __future__ import annotations

from pathlib import Path

from moored.postgres import Postgres
from moored.postgres.report._health import Health

from .conftest import MakePostgres, Sql
from .server import LIMIT, one, until

HELD = "select count(*) from pg_locks where locktype = 'advisory' and not granted"


async def stands_by(pg: Postgres) -> None:
    """Wait until it reports that another instance has the lock."""

    async def waits() -> bool:
        return pg.health is Health.WAITING

    await until(waits)


async def test_a_standby_hands_out_connections_and_keeps_them_when_it_takes_over(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    first = make(state_dir=tmp_path / "first")
    await first.open()
    await first.wait_until_active(LIMIT)
    async with make(state_dir=tmp_path / "second") as second, second.connection(LIMIT) as held:
        await until(lambda: one(sql, HELD))  # it still waits for the lock
        assert await one(held, "select 1") == 1
        await first.close()
        await second.wait_until_active(LIMIT)
        assert await one(held, "select 2") == 2


async def test_a_standby_opens_no_pool_for_administration(
    make: MakePostgres, tmp_path: Path
) -> None:
    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        async with make(state_dir=tmp_path / "second", pool_size=3) as second:
            await stands_by(second)
            pools = second.statistics()["pools"]
            assert {name: each["connected"] for name, each in pools.items()} == {"snapshot": 2}
