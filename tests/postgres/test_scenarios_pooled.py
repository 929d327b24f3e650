"""PgBouncer in transaction mode before the server, and its failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import free_port, require_server

from moored.postgres import Postgres
from moored.postgres.report._health import Health

from .conftest import Sql
from .server import LIMIT, following, ids, one, published, quicken, through, until, walsender


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def binary() -> str:
    return require_server("pgbouncer")


def behind(pooled: str, direct: str, stream_id: str, tmp_path: Path) -> Postgres:
    return Postgres(
        pooled, replication_url=direct, stream_id=stream_id, state_dir=tmp_path, pool_size=4
    )


async def insert(pg: Postgres, number: int) -> None:
    async with pg.connection(LIMIT) as conn:
        await conn.execute("insert into orders values (%s, 'x')", (number,))


async def test_the_pool_recovers_from_a_restarted_pooler(
    binary: str, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """The stream does not use the pooler; callers of connection() wait."""
    port = free_port()
    async with behind(through(streamed_url, port), streamed_url, stream_id, tmp_path) as pg:
        changes = pg.changes(tables=["orders"])
        with pgbouncer(binary, streamed_url, port=port):
            await published(streamed_url, stream_id)
            await pg.wait_until_active(LIMIT)
            await until(lambda: walsender(sql, pg))
            before = await walsender(sql, pg)
            await insert(pg, 1)
            assert ids(await following(changes)) == [1]
        await pg.monitor.wait_until(lambda status: status.health is not Health.ACTIVE, LIMIT)
        await sql.execute("insert into orders values (2, 'meanwhile')")
        assert ids(await following(changes)) == [2]
        asking = asyncio.create_task(insert(pg, 3))
        with pgbouncer(binary, streamed_url, port=port):
            await asyncio.wait_for(asking, LIMIT)
            assert ids(await following(changes)) == [3]
            await pg.wait_until_active(LIMIT)
            assert await walsender(sql, pg) == before


async def test_the_pool_recovers_from_terminated_pooler_connections(
    binary: str, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    with pgbouncer(binary, streamed_url) as url:
        async with behind(url, streamed_url, stream_id, tmp_path) as pg:
            changes = pg.changes(tables=["orders"])
            await published(streamed_url, stream_id)
            await until(lambda: walsender(sql, pg))
            before = await walsender(sql, pg)
            for number in range(1, 4):
                await insert(pg, number)
                assert ids(await following(changes)) == [number]
                await sql.execute(
                    "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                    "where datname = current_database() and backend_type = 'client backend' "
                    "and pid <> pg_backend_pid()"
                )
            await until(lambda: inserted(pg, 4))
            assert ids(await following(changes)) == [4]
            assert await walsender(sql, pg) == before


async def inserted(pg: Postgres, number: int) -> bool:
    """Whether a write succeeds: the pooler may still hold a lost connection."""
    try:
        await insert(pg, number)
    except psycopg.OperationalError:
        return False
    return True


async def test_the_pool_waits_for_the_server_behind_a_pooler(
    binary: str, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """PgBouncer takes the connection, and ends it when it gets none to the server."""
    nowhere, port = through(streamed_url, free_port()), free_port()
    settings = "server_login_retry = 1\nserver_connect_timeout = 1\nquery_wait_timeout = 1"
    async with behind(through(streamed_url, port), streamed_url, stream_id, tmp_path) as pg:
        changes = pg.changes(tables=["orders"])
        with pgbouncer(binary, nowhere, port=port, settings=settings):
            await until(lambda: said(pg, "check the pooler's log"))
            with pytest.raises(TimeoutError, match="snapshot_connection_pool_ready"):
                await pg.wait_until_active(0.1)
        with pgbouncer(binary, streamed_url, port=port):
            await pg.wait_until_active(LIMIT)
            await published(streamed_url, stream_id)
            await insert(pg, 1)
            assert ids(await following(changes)) == [1]


async def said(pg: Postgres, words: str) -> bool:
    """Whether the condition of the pool has this detail."""
    return words in str(pg.monitor.conditions()["snapshot_connection_pool_ready"].detail)


async def test_the_pool_waits_for_a_pooler_with_too_few_connections(
    binary: str, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """For as many clients as the pool wants; those that the trial takes besides come and go."""
    with pgbouncer(binary, streamed_url, settings="max_client_conn = 2") as url:
        async with behind(url, streamed_url, stream_id, tmp_path) as pg:
            await until(lambda: said(pg, "no more connections allowed"))
            assert await said(pg, "use fewer connections")
            slots = (
                "select count(*) from pg_replication_slots "
                "where active and database = current_database()"
            )
            assert await one(sql, slots) == 0
            assert pg.health is Health.STARTING
