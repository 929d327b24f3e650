"""Callers that stop early or are cancelled, and tables that are renamed or altered meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.postgres.conftest import MakePostgres, Sql
from tests.postgres.server import one, until

from moored.postgres import Follow, Postgres, PostgresError, Reset, Snapshot
from moored.postgres.stream._link import ReplicationLink

from .mirror import Copy
from .orders import LIMIT, ROWS, copied, item_of


def each_way(snapshot: Snapshot) -> list[AsyncIterator[Any]]:
    return [aiter(snapshot), snapshot.chunks(), snapshot.blocks()]


@pytest.mark.parametrize("consistent", [False, True])
async def test_leaving_a_snapshot_early_logs_no_error(
    make: MakePostgres, sql: Sql, caplog: pytest.LogCaptureFixture, consistent: bool
) -> None:
    async with make() as pg:
        for way in range(3):
            async with pg.snapshot("orders", chunk_rows=10, consistent=consistent) as snapshot:
                async for _ in each_way(snapshot)[way]:
                    break
    gc.collect()
    assert "Task exception was never retrieved" not in caplog.text


async def test_dropping_the_postgres_under_a_follower_leaves_no_unretrieved_error(
    make: MakePostgres, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that copies fails when the follower has ended."""
    waiting = "select exists (select 1 from pg_locks where not granted and locktype = 'relation')"

    async def follow_all(pg: Postgres) -> None:
        async for _ in pg.follow("orders", consumer="c", chunk_rows=5):
            if not first.done():
                first.set_result(None)

    async with make() as pg:
        first = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(follow_all(pg))
        await asyncio.wait_for(first, LIMIT)
        await sql.execute("begin; lock table orders")
        await until(lambda: one(sql, waiting))
        await pg.drop()
        await asyncio.wait_for(task, LIMIT)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
    gc.collect()
    assert "Task exception was never retrieved" not in caplog.text


async def cancelled_request(follow: Follow) -> None:
    request = asyncio.ensure_future(anext(follow))
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_follower_whose_caller_is_cancelled_goes_on_with_the_next_item(
    make: MakePostgres, sql: Sql
) -> None:
    copy = Copy("id", exact=True)
    async with make() as pg, pg.follow("orders", consumer="c", chunk_rows=20) as follow:
        while len(copy.rows) <= ROWS:
            await cancelled_request(follow)
            if len(copy.rows) == ROWS:
                await sql.execute("insert into orders values (99)")
            item = await item_of(follow)
            copy.apply(item)
            await item.ack()


async def test_tasks_that_share_a_follower_get_different_items_and_then_its_end(
    make: MakePostgres, sql: Sql
) -> None:
    copy = Copy("id", exact=True)

    async def consume(follow: Follow) -> None:
        async for item in follow:
            copy.apply(item)
            if len(copy.rows) == ROWS:
                await follow.aclose()

    async with make() as pg, pg.follow("orders", consumer="c", chunk_rows=5) as follow:
        await asyncio.wait_for(asyncio.gather(consume(follow), consume(follow)), LIMIT)


async def test_a_follower_that_ends_because_its_table_was_renamed_waits_when_started_again(
    make: MakePostgres, sql: Sql
) -> None:
    options: dict[str, Any] = {"consumer": "c", "where": "price > 0"}
    async with make() as pg:
        async with pg.follow("orders", **options) as follow:
            await copied(follow)
            await sql.execute("alter table orders rename to old")
            await sql.execute("insert into old values (99, 'new', 1)")
            with pytest.raises(PostgresError, match=r"42P01.*renamed or dropped.*started again"):
                await item_of(follow)
        async with pg.follow("orders", **options) as follow:
            request = asyncio.create_task(item_of(follow))
            while not follow._changes.unpublished:
                await asyncio.wait([request], timeout=0.02)
                assert not request.done()
            await sql.execute("alter table old rename to orders")
            (change,) = await request
            assert change.new["id"] == 99


async def test_the_reset_after_another_replica_identity_names_it(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("alter table orders alter name set not null, add unique (name)")
    async with make() as pg, pg.follow("orders", consumer="c", where="price > 0") as follow:
        await copied(follow)
        await sql.execute("alter table orders replica identity using index orders_name_key")
        await sql.execute("delete from orders where id = 1")
        item = await item_of(follow)
        assert isinstance(item, Reset)
        assert "another replica identity" in item.reason


async def test_a_copy_waits_for_a_stream_that_starts_late(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a stream there is no position from which the copy could be continued."""
    start, early = ReplicationLink.stream, None

    async def start_late(link: ReplicationLink, command: str, **timeout: Any) -> None:
        nonlocal early
        early, _ = await asyncio.wait([coming], timeout=0.5)
        await start(link, command, **timeout)

    monkeypatch.setattr(ReplicationLink, "stream", start_late)
    async with make() as pg, pg.follow("orders", consumer="c") as follow:
        coming = asyncio.create_task(item_of(follow))
        assert (await coming).position.position.lsn > 0
    assert early == set()
