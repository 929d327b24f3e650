"""How often the tables of consumers are checked, and what is reported of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.servers import require_server

from moored.embedded import EmbeddedPostgres
from moored.postgres import Postgres
from moored.postgres.decode import SCHEMA_SIGNAL
from moored.postgres.manage import _manager
from moored.postgres.server import DROP_SCHEMA_TRIGGER, SCHEMA_TRIGGER

from .conftest import MakePostgres, Sql
from .server import LIMIT, connected, following, ids, one, until


@asynccontextmanager
async def trigger(sql: Sql) -> AsyncIterator[None]:
    await sql.execute(SCHEMA_TRIGGER.encode())
    yield
    await sql.execute(DROP_SCHEMA_TRIGGER.encode())


async def test_the_event_trigger_reports_no_temporary_tables(sql: Sql, stream_id: str) -> None:
    slot = f"decoded_{stream_id}"
    query = (
        "select count(*) from pg_logical_slot_get_binary_changes(%s, null, null, 'proto_version', "
        "'1', 'publication_names', 'everything', 'messages', 'true') "
        "where encode(data, 'escape') ~ %s"
    )
    await sql.execute("create publication everything for all tables")
    await sql.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    async with trigger(sql):
        await sql.execute("create temp table passing (id serial primary key, name text)")
        await sql.execute("create temp table copied as select * from orders")
        await sql.execute("alter table passing add extra int")
        assert await one(sql, query, slot, SCHEMA_SIGNAL) == 0
        await sql.execute("alter table orders add extra int")
        assert await one(sql, query, slot, SCHEMA_SIGNAL) == 1
    await sql.execute("select pg_drop_replication_slot(%s)", (slot,))


async def test_a_temporary_table_leads_to_no_check_beside_a_publication_of_all_tables(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create publication everything for all tables")
    async with make(publication="everything", manual_publication=True) as pg:
        changes = pg.changes("c")
        await pg.wait_until_published(timeout=LIMIT)
        publisher = pg._restarter.manager._publisher

        async def settled() -> bool:
            return not await publisher.changed(sql)

        await until(settled)
        await sql.execute("create temp table passing (id int)")
        assert not await publisher.changed(sql)
        await sql.execute("create table another (id int)")
        assert await publisher.changed(sql)
        assert changes.name == "c"


async def test_the_server_compiles_no_query_of_the_catalog(tmp_path: Path) -> None:
    """Where it can, it would: for seconds, with each check."""
    options = dict.fromkeys(["jit_above_cost", "jit_inline_above_cost"], "0")
    options["shared_preload_libraries"] = "pg_stat_statements"
    binaries = Path(require_server("postgres")).parent
    async with (
        EmbeddedPostgres(bin_dir=binaries, options=options) as server,
        connected(server.url) as sql,
    ):
        await sql.execute("create extension pg_stat_statements")
        await sql.execute("create table orders (id int primary key)")
        async with (
            Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
            pg.changes("c", tables=["orders"]),
            pg.changes("everything"),
        ):
            await pg.wait_until_published(timeout=LIMIT)
        query = "select sum(jit_functions) from pg_stat_statements where query ~ %s"
        assert await one(sql, query, "pg_attribute") == 0


async def test_many_changes_of_the_schema_in_the_stream_are_few_checks(
    make: MakePostgres, sql: Sql
) -> None:
    loop = asyncio.get_running_loop()
    async with trigger(sql), make() as pg:
        changes = pg.changes("c", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        before, began = pg._hub.checks, loop.time()
        for number in range(40):
            await sql.execute(f"create table other_{number} (id int)".encode())
        await sql.execute("insert into orders values (1, 'x')")
        txn = await following(changes)
        while not ids(txn):
            txn = await following(changes)
        # Those of the stream, those of the catalog's marker, and those before.
        assert pg._hub.checks - before <= 3 + 2 * (loop.time() - began)


async def test_a_table_that_is_locked_is_not_locked_again_every_second(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """Writers wait behind each try, so the pause between two of them must grow."""
    async with connected(streamed_url) as writer, make() as pg:
        await pg.wait_until_active(LIMIT)
        async with writer.transaction():
            await writer.execute("insert into orders values (1, 'x')")
            changes = pg.changes("c", tables=["orders"])

            async def busy() -> bool:
                return changes.unpublished == ["orders"]

            await until(busy)
            assert not await pg._restarter.manager._publisher.changed(sql)
        await pg.wait_until_published("orders", timeout=LIMIT)


async def test_a_catalog_that_cannot_be_queried_is_one_warning(
    sql: Sql,
    streamed_url: str,
    stream_id: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_manager, "MARKER_EVERY", 0.05)
    caplog.set_level(logging.DEBUG, "moored.postgres")
    url = f"{streamed_url}?options=-c%20statement_timeout%3D200"
    async with Postgres(url, stream_id=stream_id, state_dir=tmp_path, pool_size=2) as pg:
        changes = pg.changes("c", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)

        async def failed() -> bool:
            return sum("cannot be queried" in each.message for each in caplog.records) > 3

        async with sql.transaction():
            await sql.execute("lock table pg_publication_rel in access exclusive mode")
            await until(failed)
        found = [each.levelname for each in caplog.records if "cannot be queried" in each.message]
        assert found.count("WARNING") == 1
        assert changes.name == "c"
