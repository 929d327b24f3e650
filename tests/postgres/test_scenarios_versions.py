"""A core set of tests with each available version of PostgreSQL.

One server for each: the embedded 18 and 16, and an installed one (15 on Debian 12).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import ConfigurationError, Postgres
from moored.postgres.report._health import Health
from moored.testing import scaled

from .conftest import MakePostgres, Sql
from .recording import Recorder, summary
from .server import (
    LIMIT,
    connected,
    following,
    ids,
    next_reset,
    one,
    published,
    quicken,
    until,
    walsender,
)

SETTINGS = {
    "wal_sender_timeout": "1s",
    "max_replication_slots": "8",
    "max_prepared_transactions": "4",
    # Small, so that a transaction of some megabytes is a large one.
    "logical_decoding_work_mem": "64kB",
    "min_wal_size": "32MB",
    "max_wal_size": "32MB",
}


@pytest.fixture(
    scope="module",
    # All other tests run with 18.
    params=[*(pytest.param(each, marks=pytest.mark.soak) for each in ("18", "16")), "installed"],
)
def postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """In the place of the newest one: a server of each version, which the tests may harm."""
    if request.param == "installed":
        bin_dir = Path(require_server("postgres")).parent
        server = SyncEmbeddedPostgres(bin_dir=bin_dir, options=SETTINGS)
    else:
        server = SyncEmbeddedPostgres(version=int(request.param), options=SETTINGS)
    with server:
        yield server


@pytest.fixture
def version(postgres: SyncEmbeddedPostgres) -> int:
    assert postgres.version is not None
    return int(postgres.version.split(".")[0])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, check_every=0.2, quiet=1.0)


async def streaming(pg: Postgres, sql: Sql, url: str, *tables: str) -> None:
    """Wait until it is active and what is written comes."""
    await published(url, pg.settings.stream_id, *tables)
    await pg.wait_until_active(LIMIT)
    await until(lambda: walsender(sql, pg))


async def event(pg: Postgres, name: str) -> str:
    """Wait for an event; gives its detail."""

    async def told() -> bool:
        return any(each.name == name for each in pg.last_events)

    await until(told)
    return next(each.detail for each in pg.last_events if each.name == name)


# -- from nothing, to nothing --------------------------------------------------------------------


async def test_it_creates_and_drops_its_slot_and_publication(
    make: MakePostgres, sql: Sql, streamed_url: str, version: int
) -> None:
    async with make() as pg:
        _changes = pg.changes(tables=["orders"])  # for as long as somebody has it
        await streaming(pg, sql, streamed_url)
        slot, publication = pg.settings.slot_name, pg.settings.publication_name
        query = "select plugin from pg_replication_slots where slot_name = %s and not temporary"
        assert await one(sql, query, slot) == "pgoutput"
        if version >= 17:
            query = "select failover from pg_replication_slots where slot_name = %s"
            assert await one(sql, query, slot)
        query = (
            "select pubinsert and pubupdate and pubdelete and pubtruncate "
            "from pg_publication where pubname = %s"
        )
        assert await one(sql, query, publication)
        if version >= 18:
            query = "select pubgencols from pg_publication where pubname = %s"
            assert await one(sql, query, publication) == "s"
        assert pg.health is Health.ACTIVE
        await pg.drop()
    assert await one(sql, "select count(*) from pg_publication") == 0
    assert await one(sql, "select count(*) from pg_replication_slots") == 0
    query = "select count(*) from pg_stat_activity where application_name = 'moored'"
    await until(lambda: equal(sql, query, 0))


async def equal(sql: Sql, query: str, value: object) -> bool:
    return bool(await one(sql, query) == value)


@pytest.mark.soak  # with 18 in `make test`
async def test_it_sleeps_and_wakes(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    rows = "select count(*) from pg_stat_activity where application_name = 'sleeper'"
    async with make(application_name="sleeper") as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        await pg.sleep()
        assert pg.health is Health.SLEEPING
        await until(lambda: equal(sql, rows, 0))
        await sql.execute("insert into orders values (1, 'meanwhile')")
        async with pg.connection() as conn:
            await conn.execute("insert into orders values (2, 'awake')")
        assert ids(await following(changes)) == [1]
        assert ids(await following(changes)) == [2]


# -- changes -------------------------------------------------------------------------------------

COLUMNS = {
    "b": ("bool", "true"),
    "i2": ("int2", "-32768"),
    "i4": ("int4", "2147483647"),
    "i8": ("int8", "-9223372036854775808"),
    "f8": ("float8", "0.1"),
    "n": ("numeric(20, 4)", "-12345678.9"),
    "t": ("text", "'Ünicode \\ '' \" '"),
    "v": ("varchar(20)", "'short'"),
    "by": ("bytea", "'\\x00ff10'"),
    "u": ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"),
    "d": ("date", "'2026-02-28'"),
    "ts": ("timestamp", "'2026-02-28 12:34:56.789'"),
    "tz": ("timestamptz", "'2026-02-28 12:34:56.789+05'"),
    "iv": ("interval", "'1 day -02:03:04'"),
    "j": ("jsonb", '\'{"a": [1, null, "x"]}\''),
    "ip": ("inet", "'10.1.2.3/8'"),
    "ar": ("int[]", "'{{1,2},{3,null}}'"),
    "ta": ("text[]", '\'{a,"b,c",null,""}\''),
    "r": ("int4range", "'[1,5)'"),
    "mr": ("int4multirange", "'{[1,5),[7,9)}'"),
    "nothing": ("text", "null"),
}


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_rows_equal_those_of_a_query(
    make: MakePostgres, sql: Sql, streamed_url: str, binary: bool
) -> None:
    declared = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    values = ", ".join(value for _, value in COLUMNS.values())
    await sql.execute(f"create table many (id int primary key, {declared})".encode())
    await sql.execute("alter table many replica identity full")
    await sql.execute("set timezone = 'UTC'")
    async with make(binary=binary) as pg:
        changes = pg.changes(tables=["many"])
        await streaming(pg, sql, streamed_url, "many")
        await sql.execute(f"insert into many values (1, {values})".encode())
        first = await queried(sql)
        (inserted,) = await following(changes)
        assert (inserted.kind, inserted.table, inserted.new) == ("insert", "many", first)
        await sql.execute("update many set id = 2, t = 'changed', ar = '{}'")
        second = await queried(sql)
        (updated,) = await following(changes)
        assert (updated.kind, updated.old, updated.new) == ("update", first, second)
        await sql.execute("delete from many")
        (deleted,) = await following(changes)
        assert (deleted.kind, deleted.old, deleted.new) == ("delete", second, None)
        await sql.execute("truncate many")
        (emptied,) = await following(changes)
        assert (emptied.kind, emptied.table) == ("truncate", "many")


async def queried(sql: Sql) -> dict[str, Any]:
    found = await sql.execute("select * from many")
    row = await found.fetchone()
    assert found.description is not None
    assert row is not None
    return dict(zip((column.name for column in found.description), row, strict=True))


@pytest.mark.soak  # with 18 in `make test`
async def test_a_column_added_while_streaming(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make(messages=True) as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        async with sql.transaction():
            await sql.execute("insert into orders values (1, 'a')")
            await sql.execute("alter table orders add price numeric default 1.5")
            await sql.execute("insert into orders values (2, 'b')")
            await sql.execute("select pg_logical_emit_message(true, 'from', 'the test')")
        first, second, *rest = await following(changes)
        assert first.new == {"id": 1, "name": "a"}
        assert second.new is not None
        assert set(second.new) == {"id", "name", "price"}
        assert [summary(each) for each in rest] == [("message", "from", b"the test")]


# -- large transactions --------------------------------------------------------------------------


async def test_a_large_transaction(make: MakePostgres, sql: Sql, streamed_url: str) -> None:
    """More than is held in memory, here and at the server."""
    rows, width = scaled(500_000, least=11_000), 250 if scaled(100) >= 100 else 1_900
    # With the one second of the other tests, a busy machine is silent for too long now and then.
    name = psycopg.sql.Identifier(sql.info.dbname)
    await sql.execute(
        psycopg.sql.SQL("alter database {} set wal_sender_timeout='10s'").format(name)
    )
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        before = await walsender(sql, pg)
        await sql.execute(
            f"insert into orders select n, repeat('x', {width}) from generate_series(1, {rows}) n"
        )
        txn = await following(changes, 3 * LIMIT)
        assert txn._committed.body.spilled
        # Beside the loop: it may take longer than the server waits for a sign of life.
        assert sum(await asyncio.to_thread(ids, txn)) == rows * (rows + 1) // 2
        await txn.ack()
        assert await walsender(sql, pg) == before


@pytest.mark.soak
async def test_a_large_transaction_of_other_tables_does_not_end_the_stream(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """The server reads it for longer than a silence may last, and sends nothing of it."""
    rows = scaled(8_000_000, least=100_000)
    name = psycopg.sql.Identifier(sql.info.dbname)
    await sql.execute(
        psycopg.sql.SQL("alter database {} set wal_sender_timeout='60s'").format(name)
    )
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        before = await walsender(sql, pg)
        await sql.execute("create table other (n int)")
        await sql.execute(f"insert into other select generate_series(1, {rows})")
        await sql.execute("insert into orders values (1, 'a')")
        assert ids(await following(changes, 10 * LIMIT)) == [1]
        assert await walsender(sql, pg) == before


def test_rolled_back_and_prepared_transactions(postgres_url: str) -> None:
    """A large transaction with a part that is rolled back, and one in two phases."""
    with Recorder.on(postgres_url) as recorder:
        recorder.run("create table t (id int primary key, name text)")
        slot = recorder.slot()
        with recorder.connection.transaction():
            recorder.run("insert into t select n, repeat('x', 100) from generate_series(1, 3000) n")
            with recorder.connection.transaction(force_rollback=True):
                recorder.run("insert into t select n, 'no' from generate_series(5001, 8000) n")
            recorder.run("insert into t select n, 'y' from generate_series(3001, 4000) n")
        recorder.run("begin", "insert into t values (9000, 'z')", "prepare transaction 'p'")
        recorder.run("commit prepared 'p'")
        found = [row["id"] for row in recorder.inserted(slot)]
        assert found == [*range(1, 4001), 9000]


# -- what breaks ---------------------------------------------------------------------------------


@pytest.mark.soak  # with 18 in `make test`
async def test_the_connection_survives_while_reading_is_paused(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        pg._hub.pressure.queue_length = 10
        before, total = await walsender(sql, pg), 300
        for number in range(total):
            await sql.execute(
                "insert into orders values (%s, repeat(md5(random()::text), 300))", (number,)
            )
        await asyncio.sleep(2.5)  # longer than twice what the server waits for a sign of life
        assert len(changes._queue) < total
        assert [ids(await following(changes))[0] for _ in range(total)] == list(range(total))
        assert await walsender(sql, pg) == before


@pytest.mark.soak  # with 18 in `make test`
async def test_the_stream_survives_a_killed_server(
    postgres: SyncEmbeddedPostgres, tmp_path: Path
) -> None:
    """Its own database: what a fixture holds would not live through it."""
    async with connected(postgres.url) as conn:
        await conn.execute("create table killed (id int primary key)")
    async with Postgres(postgres.url, stream_id="killed", state_dir=tmp_path, pool_size=2) as pg:
        changes = pg.changes(tables=["killed"])
        await published(postgres.url, "killed", "killed")
        await pg.wait_until_active(LIMIT)
        written, seen = 0, []
        for _ in range(2):
            async with connected(postgres.url) as conn:
                for _ in range(5):
                    written += 1
                    await conn.execute("insert into killed values (%s)", (written,))
            txn = await following(changes)
            seen += ids(txn)
            await txn.ack()
            await asyncio.to_thread(postgres.kill)
            await asyncio.to_thread(postgres.start)
        while not seen or seen[-1] != written:
            txn = await following(changes)
            seen += ids(txn)
            await txn.ack()
        # At least once, in order: what comes again comes after a beginning that was there before.
        assert set(seen) == set(range(1, written + 1))
        assert all(after <= before + 1 for before, after in itertools.pairwise(seen))
        await pg.wait_until_active(LIMIT)
        async with pg.connection() as conn:
            await conn.execute("drop table killed")
        await pg.drop()


async def test_a_slot_invalidated_between_runs_is_created_again(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        slot = pg.settings.slot_name
    lost = "select wal_status = 'lost' from pg_replication_slots where slot_name = %s"
    async with kept_log(sql, "1MB"), asyncio.timeout(LIMIT):
        while not await one(sql, lost, slot):
            await sql.execute("select pg_logical_emit_message(false, 'x', repeat('x', 100000))")
            await sql.execute("select pg_switch_wal()")
            await sql.execute("checkpoint")
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        assert "slot" in (await next_reset(changes)).reason
        asking = asyncio.create_task(following(changes))
        await streaming(pg, sql, streamed_url)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await asking) == [1]


@asynccontextmanager
async def kept_log(sql: Sql, size: str) -> AsyncIterator[None]:
    """The server keeps no more log than that for a slot."""
    await sql.execute(f"alter system set max_slot_wal_keep_size = '{size}'".encode())
    await sql.execute("select pg_reload_conf()")
    try:
        yield
    finally:
        await sql.execute("alter system reset max_slot_wal_keep_size")
        await sql.execute("select pg_reload_conf()")


@pytest.mark.soak  # with 18 in `make test`
async def test_a_publication_dropped_while_streaming_is_created_again(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """A warning from 18 on, an error before: both are a reset."""
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        await sql.execute("insert into orders values (1, 'x')")
        await (await following(changes)).ack()
        await sql.execute(f"drop publication moored_publication_{stream_id}".encode())
        await sql.execute("insert into orders values (2, 'to nobody')")
        await next_reset(changes)
        asking = asyncio.create_task(following(changes))
        await streaming(pg, sql, streamed_url)
        await sql.execute("insert into orders values (3, 'x')")
        assert ids(await asking) == [3]


# -- the lock, and the slot that cannot be made --------------------------------------------------


@pytest.mark.soak  # with 18 in `make test`
async def test_the_lock_is_handed_over_and_a_stuck_one_is_broken(
    make: MakePostgres, sql: Sql, streamed_url: str, tmp_path: Path
) -> None:
    first = make(state_dir=tmp_path / "first")
    await first.open()
    theirs = first.changes(tables=["orders"])
    await streaming(first, sql, streamed_url)
    slot = first.settings.slot_name
    async with make(state_dir=tmp_path / "second") as second:
        ours = second.changes(tables=["orders"])
        await second.monitor.wait_until(lambda status: status.health is Health.WAITING, LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(theirs)) == [1]  # and does not acknowledge it
        await first.close()
        assert ids(await following(ours)) == [1]
    async with connected(streamed_url, application_name="stuck") as stuck:
        await stuck.execute("select pg_advisory_lock(hashtext(%s))", (slot,))
        async with make(state_dir=tmp_path / "second") as third:
            await third.wait_until_active(LIMIT)
        query = "select count(*) from pg_stat_activity where application_name = 'stuck'"
        assert await one(sql, query) == 0


@pytest.mark.soak  # with 18 in `make test`
async def test_a_pending_transaction_delays_the_slot_and_is_named(
    make: MakePostgres, sql: Sql, streamed_url: str, version: int
) -> None:
    async with connected(streamed_url) as blocker, make() as pg:
        await blocker.execute("begin")
        await blocker.execute("insert into orders values (1, 'pending')")
        said = await event(pg, "replication_slot_creation_blocked_by_pending_transactions")
        assert f"pid {blocker.info.backend_pid}" in said
        if version < 16:
            said = await event(pg, "replication_slot_unblock_unavailable")
            assert "pg_log_standby_snapshot" in said
        await blocker.execute("commit")
        await pg.wait_until_active(LIMIT)
        told = {each.name for each in pg.last_events}
        assert ("replication_slot_unblock_unavailable" in told) == (version < 16)


# -- what is missing -----------------------------------------------------------------------------


@asynccontextmanager
async def role(sql: Sql, url: str, attributes: str) -> AsyncIterator[str]:
    """Create a user with these attributes who owns the table; yield its URL."""
    known = psycopg.conninfo.conninfo_to_dict(url)
    await sql.execute(f"create role somebody login password 'x' {attributes}".encode())
    await sql.execute("alter table orders owner to somebody")
    await sql.execute(f'grant create on database "{known["dbname"]}" to somebody'.encode())
    try:
        yield url.replace(f"{known['user']}:{known['password']}@", "somebody:x@")
    finally:
        ended = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s"
        await sql.execute(ended, ("somebody",))
        await sql.execute("reassign owned by somebody to current_user")
        await sql.execute("drop owned by somebody")
        await sql.execute("drop role somebody")


async def test_a_user_with_only_the_replication_privilege(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with (
        role(sql, streamed_url, "replication") as url,
        Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await streaming(pg, sql, streamed_url)
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]


async def test_a_user_without_the_replication_privilege_is_fatal(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with (
        role(sql, streamed_url, "") as url,
        Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg,
    ):
        with pytest.raises(ConfigurationError, match="run ALTER ROLE … WITH REPLICATION"):
            await pg.wait_until_active(LIMIT)


@pytest.mark.soak  # with 18 in `make test`
async def test_a_reached_connection_limit_is_reported(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """One is enough to begin: the trial and the replication client; not for the pools."""
    async with (
        role(sql, streamed_url, "replication connection limit 1") as url,
        Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg,
    ):

        async def says_why() -> bool:
            with pytest.raises(TimeoutError) as caught:
                await pg.wait_until_active(0.5)
            return "raise its CONNECTION LIMIT" in str(caught.value)

        await until(says_why)
        assert pg.health is Health.STARTING
        await sql.execute("alter role somebody connection limit 10")
        await pg.wait_until_active(LIMIT)


@pytest.mark.soak  # with 18 in `make test`
async def test_a_connection_limit_of_zero_is_retried(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with (
        role(sql, streamed_url, "replication connection limit 0") as url,
        Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg,
    ):
        said = await event(pg, "connection_error")
        assert "too many connections for role" in said
        assert "raise its CONNECTION LIMIT" in said
        await sql.execute("alter role somebody connection limit 10")
        await pg.wait_until_active(LIMIT)


async def test_a_server_without_a_free_slot_is_retried(make: MakePostgres, sql: Sql) -> None:
    names = [f"taken_{number}" for number in range(8)]
    for name in names:
        await sql.execute("select pg_create_physical_replication_slot(%s)", (name,))
    try:
        async with make() as pg:
            said = await event(pg, "connection_error")
            assert "all replication slots of the server are in use" in said
            assert "raise max_replication_slots" in said
            await sql.execute("select pg_drop_replication_slot(%s)", (names.pop(),))
            await pg.wait_until_active(LIMIT)
    finally:
        for name in names:
            await sql.execute("select pg_drop_replication_slot(%s)", (name,))
