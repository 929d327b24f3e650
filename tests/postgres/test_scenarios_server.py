"""Limits of a server, lost slots, dropped publications, poolers, and sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import require_server

from moored.embedded import EmbeddedPostgres
from moored.postgres import ConfigurationError, Postgres, Reset
from moored.postgres.report._health import Health

from .conftest import MakePostgres, Sql
from .server import (
    LIMIT,
    connected,
    following,
    ids,
    next_reset,
    one,
    own_server,
    published,
    quicken,
    until,
    walsender,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


# -- its settings --------------------------------------------------------------------------------


async def test_a_wal_level_that_is_not_logical_is_fatal(tmp_path: Path) -> None:
    async with (
        own_server(wal_level="replica") as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        with pytest.raises(ConfigurationError, match="set wal_level = logical"):
            await pg.wait_until_active(LIMIT)
        with pytest.raises(ConfigurationError, match="set wal_level = logical"):
            await asyncio.wait_for(anext(changes), LIMIT)
        assert pg.health is Health.FAILED
        async with connected(server.url) as conn:
            query = "select count(*) from pg_stat_activity where application_name = 'moored'"
            await until(lambda: is_zero(conn, query))


async def is_zero(conn: Sql, query: str) -> bool:
    return bool(await one(conn, query) == 0)


async def test_a_server_with_too_few_connections_is_retried(tmp_path: Path) -> None:
    async with own_server(max_connections="8", superuser_reserved_connections="0") as server:
        taken = [await psycopg.AsyncConnection.connect(server.url) for _ in range(6)]
        async with Postgres(server.url, state_dir=tmp_path, pool_size=4) as pg:
            changes = pg.changes(tables=["orders"])
            await asyncio.sleep(1.0)  # it tries, in vain
            assert pg.health in (Health.STARTING, Health.WAITING)
            for conn in taken:
                await conn.close()
            await pg.wait_until_active(LIMIT)
            await published(server.url, "default")
            async with pg.connection() as conn:
                await conn.execute("insert into orders values (1, 'x')")
            assert ids(await following(changes)) == [1]


async def test_a_server_without_a_free_walsender_is_retried(tmp_path: Path) -> None:
    async with (
        own_server(max_wal_senders="1") as server,
        connected(server.url, replication="database") as taken,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        event = await asyncio.wait_for(anext(pg.events()), LIMIT)
        while event.name != "connection_error":
            event = await asyncio.wait_for(anext(pg.events()), LIMIT)
        assert (
            "raise max_wal_senders; `moored doctor URL` reports it as senders_left" in event.detail
        )
        await taken.close()
        await pg.wait_until_active(LIMIT)


# -- the slot ------------------------------------------------------------------------------------


async def test_an_invalidated_slot_is_created_again(tmp_path: Path) -> None:
    async with own_server(
        max_slot_wal_keep_size="1MB", min_wal_size="32MB", max_wal_size="32MB"
    ) as server:
        async with Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg:
            changes = pg.changes(tables=["orders"])
            await published(server.url, "default")
            await pg.wait_until_active(LIMIT)
        await lose(server)
        async with Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg:
            changes = pg.changes(tables=["orders"])
            reset = await next_reset(changes)
            assert "slot" in reset.reason
            asking = asyncio.create_task(following(changes))
            await published(server.url, "default")
            await pg.wait_until_active(LIMIT)
            async with connected(server.url) as conn:
                await conn.execute("insert into orders values (1, 'x')")
                assert ids(await asking) == [1]
                status = "select wal_status from pg_replication_slots"
                assert await one(conn, status) != "lost"


async def lose(server: EmbeddedPostgres) -> None:
    """Write so much log that the slot loses its own."""
    lost = "select wal_status = 'lost' from pg_replication_slots"
    async with connected(server.url) as conn, asyncio.timeout(LIMIT):
        while not await one(conn, lost):
            await conn.execute("select pg_logical_emit_message(false, 'x', repeat('x', 100000))")
            await conn.execute("select pg_switch_wal()")
            await conn.execute("checkpoint")


async def test_a_publication_dropped_between_runs_is_created_again(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)
    await sql.execute(f"drop publication moored_publication_{stream_id}".encode())
    await sql.execute("insert into orders values (1, 'to nobody')")
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await next_reset(changes)
        asking = asyncio.create_task(following(changes))
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (2, 'x')")
        assert ids(await asking) == [2]


@pytest.mark.soak  # test_publications drops it while streaming, too
async def test_a_publication_dropped_while_streaming_is_created_again(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """Changes that are made meanwhile are lost, which must be a reset."""
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        await until(lambda: walsender(sql, pg))
        await sql.execute("insert into orders values (1, 'x')")
        await (await following(changes)).ack()
        await sql.execute(f"drop publication moored_publication_{stream_id}".encode())
        await sql.execute("insert into orders values (2, 'to nobody')")
        item = await asyncio.wait_for(anext(changes), LIMIT)
        assert isinstance(item, Reset)
        asking = asyncio.create_task(following(changes))
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (3, 'x')")
        assert ids(await asking) == [3]


# -- a pooler between ----------------------------------------------------------------------------


async def test_connections_through_a_pooler(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    with pgbouncer(require_server("pgbouncer"), streamed_url) as pooled_url:
        async with Postgres(
            pooled_url,
            replication_url=streamed_url,
            stream_id=stream_id,
            state_dir=tmp_path,
            pool_size=4,
        ) as pg:
            changes = pg.changes(tables=["orders"])
            await published(streamed_url, stream_id)

            async def write(number: int) -> None:
                for step in range(5):
                    async with pg.connection() as conn:
                        values = (number * 10 + step, "x")
                        await conn.execute("insert into orders values (%s, %s)", values)

            await asyncio.gather(*map(write, range(6)))
            seen = [ids(await following(changes))[0] for _ in range(30)]
            assert sorted(seen) == [number * 10 + step for number in range(6) for step in range(5)]
            assert [n for n in seen if n < 10] == [0, 1, 2, 3, 4]


async def test_replication_through_a_pooler_is_fatal(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    with pgbouncer(require_server("pgbouncer"), streamed_url) as pooled_url:
        async with make(replication_url=pooled_url) as pg:
            with pytest.raises(ConfigurationError, match="set replication_url to the server"):
                await pg.wait_until_active(LIMIT)


# -- scale to zero -------------------------------------------------------------------------------

ROWS = "select count(*) from pg_stat_activity where application_name = 'sleeper'"


async def test_cancelled_sleep_and_wake_calls_are_completed(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        for turns in range(6):
            for act in (pg.sleep, pg.wake):
                given_up = asyncio.create_task(act())
                for _ in range(turns):
                    await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.wait({given_up})
            await pg.sleep()
            assert pg.health is Health.SLEEPING
            async with pg.connection(timeout=LIMIT) as conn:
                assert await one(conn, "select 7") == 7
            await pg.wait_until_active(LIMIT)


async def test_asleep_it_has_no_connection_and_awake_it_delivers_what_it_missed(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make(sleep_after=2.0, application_name="sleeper") as pg:
        changes = pg.changes(tables=["orders"])
        async with pg.connection():  # in use, it does not fall asleep, however long this takes
            await published(streamed_url, stream_id)
            pg._restarter._used_at -= 10.0
            assert not pg._restarter._is_idle()
        await pg.monitor.wait_until(lambda status: status.health is Health.SLEEPING, LIMIT)
        await until(lambda: is_zero(sql, ROWS))  # a closed connection's backend ends a little later
        await sql.execute("insert into orders values (1, 'meanwhile')")
        await asyncio.sleep(0.5)
        assert await one(sql, ROWS) == 0
        before = times_ready(pg)
        await asyncio.gather(*(ask(pg) for _ in range(10)))
        async with pg.connection():
            assert ids(await following(changes)) == [1]
        assert times_ready(pg) == before + 1
        await pg.monitor.wait_until(lambda status: status.health is Health.SLEEPING, LIMIT)
        await until(lambda: is_zero(sql, ROWS))


async def test_a_wait_for_the_stream_or_a_table_keeps_it_awake(make: MakePostgres) -> None:
    async with make(sleep_after=3600.0) as pg:
        for tables in ((), ("none",)):
            waiting = asyncio.ensure_future(
                pg.wait_until_published(*tables) if tables else pg.wait_until_active()
            )
            await asyncio.sleep(0)
            pg._restarter._used_at -= 7200.0
            assert not waiting.done()
            assert not pg._restarter._is_idle()
            await pg.wait_until_active(LIMIT)
            waiting.cancel()


def times_ready(pg: Postgres) -> int:
    return [event.name for event in pg.last_events].count("ready")


async def ask(pg: Postgres) -> None:
    async with pg.connection() as conn:
        assert await one(conn, "select 1") == 1


async def test_sleep_and_wake_on_demand(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make(application_name="sleeper") as pg:
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        for number in (1, 2):
            await pg.sleep()
            assert pg.health is Health.SLEEPING
            await until(lambda: is_zero(sql, ROWS))
            await sql.execute("insert into orders values (%s, 'x')", (number,))
            await asyncio.gather(*(pg.wake() for _ in range(10)))
            txn = await following(changes)
            assert ids(txn) == [number]
            await txn.ack()
