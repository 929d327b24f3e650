"""`pg.snapshot()` and `pg.follow()`, one property at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.postgres.conftest import MakePostgres, Sql
from tests.postgres.server import connected

from moored.kernel import Tasks
from moored.postgres import (
    UNCHANGED,
    ConfigurationError,
    Delete,
    Follow,
    Insert,
    Postgres,
    PostgresError,
    Reset,
    Rows,
    Snapshot,
    Transaction,
    Update,
)
from moored.postgres.snapshot import _reader
from moored.postgres.snapshot._join import Sight

from .orders import LIMIT, ROWS, column, copied, item_of

# -- snapshot --------------------------------------------------------------------------------------


async def test_a_snapshot_has_all_rows_in_chunks_and_reports_progress(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg, pg.snapshot("orders", chunk_rows=7) as snapshot:
        rows = [row async for row in snapshot]
        assert [row["id"] for row in rows] == list(range(1, ROWS + 1))
        assert rows[3] == {"id": 4, "name": "order 4", "price": 6}
        progress = snapshot.progress
        assert (progress.rows, progress.estimated, progress.complete) == (ROWS, ROWS, True)
        assert progress.seconds_left == 0.0
        assert not snapshot.one_snapshot
        names = [event.name for event in pg.last_events]
        assert "snapshot_started" in names
        assert "snapshot_finished" in names


async def test_where_and_columns_choose_rows_and_values(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        options: dict[str, Any] = {"where": "name like '%1' and id > 5", "columns": ["price"]}
        async with pg.snapshot("public.orders", chunk_rows=7, **options) as snapshot:
            rows = [row async for row in snapshot]
    assert [row["id"] for row in rows] == [11, 21, 31, 41]
    assert rows[0].keys() == {"id", "price"}


async def test_blocks_are_what_copy_writes(make: MakePostgres, sql: Sql) -> None:
    await sql.execute("update orders set name = E'a\\tb\\nc\\\\' where id = 9")
    async with sql.cursor().copy("copy (select * from orders order by id) to stdout") as copy:
        expected = b"".join([bytes(part) async for part in copy])
    async with make() as pg, pg.snapshot("orders", chunk_rows=20) as snapshot:
        lines = b"".join([block async for block in snapshot.blocks()]).splitlines(keepends=True)
        assert snapshot.progress.rows == ROWS
    assert sorted(lines) == sorted(expected.splitlines(keepends=True))


async def test_a_snapshot_continues_after_its_last_finished_chunk(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.snapshot("orders", chunk_rows=10) as first, aclosing(aiter(first)) as rows:
            before = [(await anext(rows))["id"] for _ in range(25)]
            position = str(first.position)
        async with pg.snapshot("orders", chunk_rows=10, start=position) as second:
            after = [row["id"] async for row in second]
            complete = str(second.position)
        for consistent in (False, True):
            async with pg.snapshot("orders", start=complete, consistent=consistent) as third:
                assert await all_rows(third) == []
        with pytest.raises(PostgresError, match="cannot be continued"):
            await pg.snapshot("orders", start=f"1{position}").__aenter__()  # of another server
        await sql.execute("alter table orders add column note text")
        with pytest.raises(PostgresError, match="cannot be continued"):
            await pg.snapshot("orders", start=position).__aenter__()
    assert before[:20] + after == list(range(1, ROWS + 1))


async def test_a_snapshot_has_a_position_also_without_a_stream(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    async with make() as active:
        await active.wait_until_active(LIMIT)
        async with make(state_dir=tmp_path / "2") as standby:
            with pytest.raises(PostgresError, match="no position yet"):
                _ = standby.snapshot("orders").position
            async with standby.snapshot("orders") as snapshot:
                assert len([row async for row in snapshot]) == ROWS
                complete = snapshot.position
        async with active.snapshot("orders", start=complete) as snapshot:
            assert await all_rows(snapshot) == []


async def test_a_consistent_snapshot_has_one_moment_and_says_so(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg, pg.snapshot("orders", chunk_rows=10, consistent=True) as snapshot:
        assert snapshot.one_snapshot
        async with aclosing(aiter(snapshot)) as rows:
            found = [await anext(rows)]
            await sql.execute("update orders set name = 'late'; delete from orders where id = 30")
            found += [row async for row in rows]
        assert [row["name"] for row in found] == [f"order {n}" for n in range(1, ROWS + 1)]
        started = [event.detail for event in pg.last_events if event.name == "snapshot_started"]
        assert "with one snapshot" in started[0]


async def test_no_transaction_is_open_while_the_rows_of_a_chunk_are_used(
    make: MakePostgres, sql: Sql
) -> None:
    query = (
        "select pid from pg_stat_activity where state like 'idle in transaction%' "
        "and application_name like 'moored%' and datname = current_database()"
    )
    async with (
        make() as pg,
        pg.snapshot("orders", chunk_rows=40) as snapshot,
        aclosing(aiter(snapshot)) as rows,
    ):
        for _ in range(45):  # in the last chunk: no other one is read ahead
            await anext(rows)
        async with asyncio.timeout(LIMIT):
            while await column(sql, query):  # noqa: ASYNC110 - the pool ends it
                await asyncio.sleep(0.01)


async def test_a_snapshot_that_is_left_or_cancelled_returns_its_connections(
    make: MakePostgres, sql: Sql
) -> None:
    async with make(pool_size=2) as pg:  # one connection for snapshots
        for consistent in (False, True):
            for blocks in (False, True):
                async with pg.snapshot("orders", chunk_rows=3, consistent=consistent) as snapshot:
                    pieces = aiter(snapshot.blocks()) if blocks else aiter(snapshot)
                    async with aclosing(pieces):  # type: ignore[type-var]
                        await anext(pieces)
        async with pg.snapshot("orders") as snapshot:
            await sql.execute("begin; lock table orders in access exclusive mode")
            reading = Tasks().start(all_rows(snapshot))
            blocked = "select pid from pg_locks where not granted"
            async with asyncio.timeout(LIMIT):
                while not await column(sql, blocked):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await sql.execute("rollback")
        async with pg.snapshot("orders") as snapshot:
            assert len(await all_rows(snapshot)) == ROWS


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
async def test_chunks_whose_connections_are_lost_are_read_again(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    monkeypatch.setattr(_reader, "BACKOFF", (0.05, 0.5))
    blocked = "select pid from pg_locks where relation = 'orders'::regclass and not granted"

    async def waiting(without: set[int]) -> set[int]:
        while not (found := set(await column(sql, blocked)) - without):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return found

    async with make() as pg, pg.snapshot("orders", chunk_rows=5) as snapshot:
        pieces = aiter(snapshot.blocks()) if blocks else aiter(snapshot)
        found: list[Any] = [await anext(pieces)]
        await sql.execute("begin; lock table orders in access exclusive mode")
        reading = Tasks().start(rest_of(pieces))
        async with asyncio.timeout(LIMIT):
            lost = await waiting(set())
            await sql.execute("select pg_terminate_backend(unnest(%s::int[]))", (list(lost),))
            await waiting(lost)  # tried again
            await sql.execute("rollback")
            found += await reading
    if blocks:
        ids = [int(line.split(b"\t")[0]) for line in b"".join(found).splitlines()]
    else:
        ids = [row["id"] for row in found]
    assert sorted(ids) == list(range(1, ROWS + 1))


async def rest_of(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


async def all_rows(snapshot: Snapshot) -> list[Any]:
    return [row async for row in snapshot]


async def test_several_tables_are_copied_at_once_through_a_small_pool(
    make: MakePostgres, sql: Sql
) -> None:
    for n in range(4):
        await sql.execute(f"create table t{n} (like orders including all)".encode())
        await sql.execute(f"insert into t{n} select * from orders".encode())

    async def count(pg: Postgres, table: str) -> int:
        async with pg.snapshot(table, chunk_rows=5) as snapshot:
            return sum([1 async for _ in snapshot])

    async with make(pool_size=3) as pg:
        counts = await asyncio.gather(*(count(pg, f"t{n}") for n in range(4)))
    assert counts == [ROWS] * 4


async def test_a_table_that_cannot_be_copied_is_refused(make: MakePostgres, sql: Sql) -> None:
    await sql.execute("create view seen as select * from orders; create table bare (id int)")
    async with make() as pg:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("missing", {}, "the table missing does not exist"),
            ("seen", {}, "seen is not a table"),
            ("orders", {"columns": ["nam"]}, "has no column nam"),
            ("bare", {"where": "id > 1"}, "needs a primary key"),
        ]
        for table, options, reason in cases:
            with pytest.raises(ConfigurationError, match=reason):
                await pg.snapshot(table, **options).__aenter__()
        with pytest.raises(PostgresError, match="syntax error"):
            async with pg.snapshot("orders", where="id >") as snapshot:
                await anext(aiter(snapshot))
        with pytest.raises(ValueError, match="chunk_rows=0 must be at least 1"):
            pg.snapshot("orders", chunk_rows=0)


async def test_values_of_rows_equal_those_of_changes(make: MakePostgres, sql: Sql) -> None:
    await sql.execute(
        "create type mood as enum ('sad', 'glad'); create table types (id uuid primary key, "
        "m mood, t timestamptz, d date, i interval, j jsonb, b bytea, a int[], n numeric, "
        "g int generated always as (1 + 1) stored)"
    )
    insert = (
        "insert into types values (gen_random_uuid(), 'glad', now(), 'infinity', '1 mon 2 days', "
        """'{"a": [1]}', '\\x00ff', '{1,null}', 1.50)"""
    )
    for binary in (False, True):
        await sql.execute("delete from types")
        await sql.execute(insert.encode())
        async with (
            make(binary=binary, stream_id=f"types_{binary}".lower()) as pg,
            pg.follow("types", consumer="c") as follow,
        ):
            (row,) = await item_of(follow)
            await sql.execute("update types set id = id")
            (change,) = await item_of(follow)
            assert change.new == row


# -- follow ----------------------------------------------------------------------------------------


async def test_a_follower_continues_after_what_it_has_acknowledged(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            first = await item_of(follow)
            await first.ack()
            second = await item_of(follow)  # not acknowledged
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            assert list(await item_of(follow)) == list(second)
            await copied(follow)
            await sql.execute("delete from orders where id = 1")
            txn = await item_of(follow)
            assert [(change.kind, change.old) for change in txn] == [("delete", {"id": 1})]
            await txn.ack()
    async with make() as pg, pg.follow("orders", consumer="c") as follow:
        await sql.execute("insert into orders values (99)")
        (change,) = await item_of(follow)
        assert isinstance(change, Insert)


async def test_a_deleted_row_of_a_chunk_that_is_copied_again_does_not_stay(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            rows = {row["id"] for row in await item_of(follow)}  # it has its effect, and no ack()
        await sql.execute("delete from orders where id = 7; update orders set id = 77 where id = 8")
        async with pg.follow("orders", consumer="c", chunk_rows=20) as follow:
            while True:
                item = await item_of(follow)
                if isinstance(item, Rows):
                    rows |= {row["id"] for row in item}
                for change in item if isinstance(item, Transaction) else ():
                    if change.old is not None:
                        rows.discard(change.old["id"])
                    if change.new is not None:
                        rows.add(change.new["id"])
                await item.ack()
                if follow.progress.complete and 7 not in rows:
                    break
            assert rows == set(await column(sql, "select id from orders"))


async def test_the_position_of_a_snapshot_is_where_a_follower_continues(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.changes("c", tables=["orders"]):
            await pg.wait_until_published("orders", timeout=LIMIT)
        async with pg.snapshot("orders", chunk_rows=20) as snapshot:
            ids = [row["id"] async for row in snapshot]
            position = str(snapshot.position)
        await sql.execute("insert into orders values (1000)")
        async with pg.follow("orders", consumer="c", start=position) as follow:
            (change,) = await item_of(follow)
            assert change.new["id"] == 1000
    assert ids == list(range(1, ROWS + 1))


async def test_a_reset_begins_the_copy_again_or_ends_the_iteration(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        async with pg.follow("orders", consumer="c") as follow:
            await copied(follow)
        await pg._hub.drop("c", "the test wants it")
        async with pg.follow("orders", consumer="c", begin_again=False) as follow:
            assert await item_of(follow) == Reset("the test wants it", number=1)
            with pytest.raises(StopAsyncIteration):
                await item_of(follow)
        async with pg.follow("orders", consumer="c") as follow:
            assert await item_of(follow) == Reset("the test wants it", number=1)
            assert await copied(follow) == list(range(1, ROWS + 1))
        await pg.drop_consumer("c")
        async with pg.follow("orders", consumer="c") as follow:
            assert await copied(follow) == list(range(1, ROWS + 1))


async def test_a_reset_ends_the_wait_for_a_transaction_that_the_server_has_lost(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def lost(sight: Sight, xid: int) -> bool:
        asked.set()
        return False

    async with make() as pg, pg.follow("orders", consumer="c", where="true") as follow:
        assert await copied(follow) == list(range(1, ROWS + 1))
        with monkeypatch.context() as patch:
            patch.setattr(Sight, "sees", lost)
            await sql.execute("insert into orders values (1000)")
            coming = asyncio.ensure_future(item_of(follow))
            await asyncio.wait_for(asked.wait(), LIMIT)
            await pg._hub.drop("c", "restored from a backup")
            assert await coming == Reset("restored from a backup", number=1)
        assert await copied(follow) == [*range(1, ROWS + 1), 1000]


async def test_a_reset_ends_the_wait_for_the_writers_of_a_table(
    make: MakePostgres, sql: Sql, streamed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    sees = Sight.sees

    def watched(sight: Sight, xid: int) -> bool:
        asked.set()
        return sees(sight, xid)

    async with make() as pg, pg.follow("orders", consumer="c") as follow:
        assert await copied(follow) == list(range(1, ROWS + 1))
        async with connected(streamed_url) as writer, writer.transaction():
            await writer.execute("insert into orders values (1000)")
            await pg._hub.drop("c", "the first")
            assert await item_of(follow) == Reset("the first", number=1)
            monkeypatch.setattr(Sight, "sees", watched)
            coming = asyncio.ensure_future(item_of(follow))
            await asyncio.wait_for(asked.wait(), LIMIT)
            await pg._hub.drop("c", "restored from a backup")
            while not isinstance(item := await coming, Reset):
                coming = asyncio.ensure_future(item_of(follow))
            assert item == Reset("restored from a backup", number=2)


async def test_rows_enter_and_leave_the_condition(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        options: dict[str, Any] = {"where": "price > 70", "columns": ["name"]}
        async with pg.follow("orders", consumer="c", **options) as follow:
            assert await copied(follow) == [47, 48, 49, 50]
            await sql.execute("update orders set price = 99 where id = 3")
            (entered,) = await item_of(follow)
            assert isinstance(entered, Update)
            assert entered.new == {"id": 3, "name": "order 3"}
            await sql.execute("update orders set price = 1 where id = 3")
            (left,) = await item_of(follow)
            assert isinstance(left, Delete)
            assert left.old == {"id": 3}


async def test_a_large_value_that_is_not_sent_with_a_moved_key_is_read(
    make: MakePostgres, sql: Sql
) -> None:
    """The row moves from a chunk that is not copied yet to one that is."""
    await sql.execute("alter table orders alter column name set storage external")
    await sql.execute("update orders set name = repeat('large ', 2000) where id = 50")
    async with (
        make() as pg,
        pg.follow("orders", consumer="c", chunk_rows=20) as follow,
        await psycopg.AsyncConnection.connect(pg.settings.database_url) as writer,
    ):
        first = await item_of(follow)
        assert 20 in [row["id"] for row in first]
        # The second chunk was read, or is being read: the third is not before the next item.
        await writer.execute("update orders set id = 0 where id = 50")
        await writer.commit()
        written: dict[int, Any] = {}
        async with asyncio.timeout(LIMIT):
            while not written:
                item = await item_of(follow)
                if isinstance(item, Transaction):
                    written = {change.new["id"]: change.new for change in item if change.new}
        assert written[0]["name"] == "large " * 2000


@pytest.mark.parametrize("columns", [None, ["name"]])
async def test_after_the_copy_a_large_value_that_is_not_sent_with_a_moved_key_is_unchanged(
    columns: list[str] | None, make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("alter table orders alter column name set storage external")
    await sql.execute("update orders set name = repeat('large ', 2000) where id = 50")
    async with make() as pg, pg.follow("orders", consumer="c", columns=columns) as follow:
        assert 50 in await copied(follow)
        await sql.execute("update orders set id = 0 where id = 50")
        (change,) = await item_of(follow)
        assert isinstance(change, Update)
        assert change.old == {"id": 50}
        assert change.new is not None
        assert (change.new["id"], change.new["name"]) == (0, UNCHANGED)


async def test_a_table_without_a_key_is_copied_with_one_snapshot(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create table bare (id int); alter table bare replica identity full")
    await sql.execute("insert into bare select generate_series(1, 30)")
    async with make() as pg, pg.follow("bare", consumer="c", chunk_rows=10) as follow:
        assert await copied(follow) == list(range(1, 31))
        await sql.execute("update bare set id = 31 where id = 30")
        (change,) = await item_of(follow)
        assert (change.old, change.new) == ({"id": 30}, {"id": 31})
        assert any("no primary key" in event.detail for event in pg.last_events)


async def test_columns_that_a_key_only_includes_are_not_part_of_it(
    make: MakePostgres, sql: Sql
) -> None:
    await sql.execute("create table wide (id int, note text, primary key (id) include (note))")
    await sql.execute("insert into wide select generate_series(1, 30)")
    async with make() as pg, pg.snapshot("wide", chunk_rows=10) as snap:
        assert sorted([row["id"] async for row in snap]) == list(range(1, 31))


async def test_closing_ends_an_iteration_in_every_phase(make: MakePostgres, sql: Sql) -> None:
    async def consume(follow: Follow) -> int:
        return len([item async for item in follow])

    tasks = Tasks()
    pg = make()
    await pg.open()
    waiting = pg.follow("orders", consumer="early")
    early = tasks.start(consume(waiting))  # before the table is published
    await asyncio.sleep(0)
    await waiting.aclose()
    async with asyncio.timeout(LIMIT):
        assert await early == 0
        live = pg.follow("orders", consumer="live")
        following = tasks.start(consume(live))
        while not live.progress.complete:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pg.close()
        assert await following == 1
