"""What would break the order of the ids, each made to happen: it is refused, or waited for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import psycopg
import pytest
from tests.postgres.clusters import Cluster, cluster
from tests.postgres.server import connected

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import ConfigurationError
from moored.postgres.outbox import Outbox, ddl, grants
from moored.reservoir import AsyncConnectionPool

from .conftest import Sql
from .reading import LIMIT, next_reset, publishing, transaction

PUBLISH = "select moored.outbox_publish('orders', %s)"
#: Of `publishing()`.
OPEN = "open"


async def read(outbox: Outbox, cursor: str | None = None) -> list[str]:
    return [event.payload for event in (await outbox.read(cursor)).events]


async def reconnected(outbox: Outbox) -> None:
    """Wait until no connection is left that a restart has ended."""
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                await outbox.read()
                return
            except psycopg.OperationalError:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
async def test_a_pool_with_another_isolation_level_misses_no_late_commit(
    url: str, sql: Sql, level: str
) -> None:
    async def isolated(conn: psycopg.AsyncConnection[object]) -> None:
        await conn.set_isolation_level(psycopg.IsolationLevel[level])

    async with AsyncConnectionPool(url, max_size=1, configure=isolated) as pool:
        outbox = Outbox(pool)
        async with publishing(url) as late:
            await outbox.publish(sql, "orders", "early")
            batch = await outbox.read()
            assert batch.events == []
            await late.commit()
            assert await read(outbox, batch.cursor) == [OPEN, "early"]


async def test_a_sequence_with_a_cache_is_refused(outbox: Outbox, sql: Sql) -> None:
    await sql.execute("alter table moored.outbox alter id set cache 20")
    with pytest.raises(ConfigurationError, match=r"has CACHE 20.*SET CACHE 1"):
        await outbox.read()
    await sql.execute("alter table moored.outbox alter id set cache 1")
    assert await read(outbox) == []


INSERT = "insert into moored.outbox (id, channel, payload)"


@pytest.mark.parametrize(
    "statement",
    [
        "select nextval('moored.outbox_id_seq')",
        f"{INSERT} overriding system value values (7, 'orders', 'x')",
        "copy moored.outbox (id, channel, payload) from stdin",
        "insert into moored.outbox_default (channel, payload) values ('orders', 'x')",
        "update moored.outbox set payload = 'x'",
    ],
)
async def test_a_publisher_cannot_choose_an_id(url: str, sql: Sql, statement: str) -> None:
    await sql.execute("drop role if exists chooser")
    await sql.execute("create role chooser")
    await sql.execute(grants("chooser").encode())
    try:
        async with sql.transaction():
            await sql.execute("set local role chooser")
            await sql.execute(PUBLISH, ["fine"])
            async with sql.cursor().copy(
                "copy moored.outbox (channel, payload) from stdin"
            ) as copy:
                await copy.write_row(("orders", "fine"))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await sql.execute(statement.encode())
    except psycopg.errors.InFailedSqlTransaction:
        pass
    finally:
        await sql.execute("drop owned by chooser; drop role chooser")


async def test_an_insert_directly_into_a_partition_is_waited_for(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    """PostgreSQL 17 and newer accept it, and only the partition is locked."""
    async with transaction(url) as owner:
        query = "select name::text from moored.outbox_parts order by ends limit 1"
        ((name,),) = await (await sql.execute(query)).fetchall()
        await owner.execute(
            f"insert into {name} (channel, payload) values ('orders', 'direct')".encode()
        )
        await outbox.publish(sql, "orders", "by the parent")
        batch = await outbox.read()
        assert batch.events == []
        await owner.commit()
        assert await read(outbox, batch.cursor) == ["direct", "by the parent"]


async def test_the_first_event_of_a_new_outbox_is_not_missed(
    url: str, outbox: Outbox, sql: Sql
) -> None:
    async with transaction(url) as first:
        await first.execute("lock table moored.outbox in row exclusive mode")
        cursor = (await outbox.read()).cursor
        await first.execute(PUBLISH.encode(), ["1"])
        await outbox.publish(sql, "orders", "2")
        assert await read(outbox, cursor) == []
        await first.commit()
        assert await read(outbox, cursor) == ["1", "2"]


async def test_a_copy_of_the_database_with_the_same_oids_delays_nothing(
    url: str, outbox: Outbox, sql: Sql, postgres: SyncEmbeddedPostgres
) -> None:
    async with connected(postgres.url) as admin:
        name = sql.info.dbname
        await outbox.close()  # the template must not be in use
        await sql.close()
        await admin.execute(f"create database moored_copy template {name}".encode())
        try:
            async with (
                publishing(postgres.url_of("moored_copy")),
                Outbox(url) as outbox,
                connected(url) as sql,
            ):
                await outbox.publish(sql, "orders", "1")
                assert await read(outbox) == ["1"]
        finally:
            await admin.execute("drop database moored_copy with (force)")


# -- servers that are restarted ----------------------------------------------------------------


@pytest.fixture
async def db() -> AsyncIterator[Cluster]:
    async with cluster(max_prepared_transactions="4") as db:
        await db.sql(ddl(wake="poll"))  # a transaction with a NOTIFY cannot be prepared
        yield db


async def prepared(db: Cluster, statement: str) -> None:
    async with transaction(db.url) as conn:
        await conn.execute(statement.encode())
        await conn.execute("prepare transaction 'forgotten'")


async def publish(db: Cluster, text: str) -> None:
    await db.sql(f"select moored.outbox_publish('orders', '{text}')")


async def test_a_prepared_transaction_that_has_published_is_waited_for_over_a_restart(
    db: Cluster,
) -> None:
    async with Outbox(db.url, retain=None) as outbox:
        await publish(db, "0")
        await read(outbox)
        await prepared(db, "select moored.outbox_publish('orders', 'prepared')")
        await publish(db, "1")
        for restarts in range(2):
            batch = await outbox.read()
            assert [event.payload for event in batch.events] == ["0"]
            held = (await outbox.status()).held_back
            assert held is not None
            assert (held.pid, held.gid) == (None, "forgotten")
            assert "end of the prepared transaction 'forgotten' in database" in str(held)
            assert "ROLLBACK PREPARED" in outbox.explain()
            if restarts == 0:
                await db.server.stop()
                await db.server.start()
                await reconnected(outbox)
        await db.sql("commit prepared 'forgotten'")
        assert await read(outbox, batch.cursor) == ["prepared", "1"]


async def test_a_prepared_transaction_that_has_not_published_delays_nothing(db: Cluster) -> None:
    async with Outbox(db.url, retain=None) as outbox:
        await prepared(db, "create table other (id int)")
        await publish(db, "1")
        assert await read(outbox) == ["1"]
        assert (await outbox.status()).held_back is None
        await db.sql("rollback prepared 'forgotten'")


#: Commits are lost by a crash.
ASYNCHRONOUS = {"synchronous_commit": "off", "wal_writer_delay": "10s", "restart_after_crash": "on"}


async def crash(db: Cluster) -> None:
    """Kill a backend, so that the server recovers, and wait until it has."""
    async with connected(db.url) as conn:
        os.kill(conn.info.backend_pid, signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("select pg_sleep(60)")
    async with asyncio.timeout(LIMIT):
        while True:
            try:
                return await db.sql("select 1")
            except psycopg.OperationalError:
                await asyncio.sleep(0.05)


@pytest.fixture
async def forgetful() -> AsyncIterator[Cluster]:
    async with cluster(**ASYNCHRONOUS) as db:
        await db.sql(ddl(), "set synchronous_commit = on; create table flush ()", "checkpoint")
        yield db


async def test_ids_that_are_given_again_after_a_crash_are_waited_for(forgetful: Cluster) -> None:
    """What was known about the holders of locks is of no use after it."""
    db = forgetful
    async with Outbox(db.url, retain=None) as outbox:
        cursor = (await outbox.read()).cursor
        with suppress(psycopg.OperationalError):
            async with transaction(db.url) as holder:
                await holder.execute("lock table moored.outbox in row exclusive mode")
                lost = [f"select moored.outbox_publish('orders', 'lost {n}')" for n in range(40)]
                await db.sql(*lost)  # within a few seconds, before they are flushed
                assert await read(outbox, cursor) == []
                await crash(db)
        assert await db.ask("select count(*) from moored.outbox") == 0, "they were lost"
        async with publishing(db.url) as late:
            await publish(db, "1")
            assert await read(outbox, cursor) == []
            await late.commit()
            assert await read(outbox, cursor) == [OPEN, "1"]


async def test_a_cursor_of_now_is_recognized_after_a_crash(forgetful: Cluster) -> None:
    db = forgetful
    async with Outbox(db.url, retain=None) as outbox:
        batches = outbox.tail()
        await publish(db, "lost")
        cursor = (await anext(batches)).cursor
        assert cursor.split("-")[-2] == "1"
        async with outbox.consume("new", start="now") as events:
            waiting = asyncio.ensure_future(next_reset(events))
            await asyncio.sleep(0.1)
            await crash(db)
            await db.sql("delete from moored.outbox_cursors")
            for number in range(3):
                await publish(db, str(number))
            assert "a copy of the database's disk was restored" in await waiting
        reset = (await outbox.read(cursor)).reset
        assert reset is not None
        assert "the cursor's event does not exist" in reset.reason


async def test_a_restore_of_an_older_copy_forgets_what_was_final(db: Cluster) -> None:
    await publish(db, "0")
    await db.server.stop()
    copy = db.copy_data()
    await db.server.start()
    async with Outbox(db.url, retain=None) as outbox:
        cursor = (await outbox.read()).cursor
        for number in range(40):
            await publish(db, f"lost {number}")
        assert len(await read(outbox)) == 41
        await db.server.stop()
        db.replace_data(copy)
        await db.server.start()
        async with publishing(db.url) as late:
            await publish(db, "1")
            assert await read(outbox, cursor) == []
            await late.commit()
            assert await read(outbox, cursor) == [OPEN, "1"]


async def test_events_of_a_two_phase_transaction_exist_once_it_is_committed(db: Cluster) -> None:
    """With NOTIFY the server refuses to prepare it; a message in the WAL can be prepared."""
    async with Outbox(db.url, retain=None) as outbox:
        await db.sql(ddl(wake="notify"))
        with pytest.raises(psycopg.NotSupportedError, match="cannot PREPARE a transaction that"):
            await prepared(db, "select moored.outbox_publish('orders', 'refused')")
        await db.sql(ddl(wake="stream"))
        for end, found in (("rollback", []), ("commit", ["x"])):
            await prepared(db, "select moored.outbox_publish('orders', 'x')")
            assert await read(outbox) == []
            await db.sql(f"{end} prepared 'forgotten'")
            assert await read(outbox) == found
