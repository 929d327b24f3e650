"""Tables that are dropped, renamed, swapped or unpublished while a consumer follows them.

The consumer maintains a copy of the tables: it copies them again after a `Reset`, applies every
change, and must end up with the same rows as the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest
from tests.soaking import some_of

from moored.postgres import Changes, Health, Postgres
from moored.postgres.consume import Publisher
from moored.postgres.consume._store import StateStore
from moored.postgres.manage import _manager

from .conftest import MakePostgres, Sql
from .mirror import Mirror, mirroring
from .server import LIMIT, connected, following, ids, next_reset, quicken, until

Faults = Callable[[Sql], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def make(make: MakePostgres) -> MakePostgres:
    return partial(make, check_every=0.2)


async def run(conn: Sql, *statements: str) -> None:
    for statement in statements:
        await conn.execute(statement.encode())


def publication(stream_id: str) -> str:
    return f"moored_publication_{stream_id}"


NEW = "(id int primary key, name text)"
FAULTS = {
    "dropped and created": ("drop table orders", f"create table orders {NEW}"),
    "renamed and created": (
        "alter table orders rename to orders_old",
        f"create table orders {NEW}",
    ),
    "swapped": (
        f"create table orders_new {NEW}",
        "insert into orders_new values (50, 'new')",
        "begin; alter table orders rename to orders_old; "
        "alter table orders_new rename to orders; commit",
    ),
    "unpublished": ("alter publication {publication} drop table orders",),
    "published again by others": (
        "alter publication {publication} drop table orders",
        "insert into orders values (60, 'nobody is told of it')",
        "alter publication {publication} add table orders",
    ),
    "only inserts": ("alter publication {publication} set (publish = 'insert')",),
    "only inserts for a moment": (
        "alter publication {publication} set (publish = 'insert')",
        "delete from orders where id = 1",
        "alter publication {publication} set (publish = 'insert, update, delete, truncate')",
    ),
}


@pytest.mark.parametrize("fault", some_of(FAULTS, "renamed and created", "only inserts"))
async def test_a_mirror_agrees_after_a_table_fault_while_it_streams(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, fault: str
) -> None:
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x'), (2, 'x')")
        await until(mirror.agrees)
        await run(sql, *(each.format(publication=publication(stream_id)) for each in FAULTS[fault]))
        await run(
            sql,
            "insert into orders values (70, 'after')",
            "update orders set name = 'changed' where id = 70",
        )
        await until(lambda: has_resets(mirror, 1))
        await run(sql, "insert into orders values (80, 'x')", "delete from orders where id = 70")
        await until(mirror.agrees)
        assert len(mirror.resets) == 1
        assert "orders" in mirror.resets[0] or publication(stream_id) in mirror.resets[0]
        assert pg.statistics()["restarts"] == 0


async def has_resets(mirror: Mirror, number: int) -> bool:
    assert not mirror._task.done() or mirror._task.result()
    return len(mirror.resets) >= number


@pytest.mark.parametrize("fault", some_of(FAULTS, "swapped", "dropped and created", "unpublished"))
async def test_a_mirror_agrees_after_a_table_fault_while_it_was_away(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, fault: str
) -> None:
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x'), (2, 'x')")
        await until(mirror.agrees)
        rows = mirror.rows
    await run(sql, *(each.format(publication=publication(stream_id)) for each in FAULTS[fault]))
    await run(sql, "insert into orders values (70, 'after')", "delete from orders where id = 2")
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        mirror.rows = rows
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (80, 'x')")
        await until(mirror.agrees)
        assert len(mirror.resets) == 1


async def test_a_consumer_of_all_tables_gets_a_reset_when_one_is_unpublished(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    await run(sql, f"create table other {NEW}")
    async with make() as pg:
        everything = pg.changes("everything")
        orders = pg.changes("orders", tables=["orders"])
        other = pg.changes("other", tables=["other"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "insert into other values (1, 'x')")
        assert ids(await following(everything)) == [1]
        await other.aclose()
        await run(sql, f"alter publication {publication(stream_id)} drop table other")
        assert "other" in (await next_reset(everything)).reason
        await run(sql, "insert into orders values (1, 'x')")
        assert ids(await following(everything)) == [1]
        assert ids(await following(orders)) == [1]


async def test_a_table_renamed_and_back_within_a_transaction_loses_nothing(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(
            sql,
            "begin",
            "insert into orders values (1, 'x')",
            "alter table orders rename to parked",
            "insert into parked values (2, 'x')",
            "alter table parked rename to orders",
            "insert into orders values (3, 'x')",
            "alter table orders rename to parked",
            "commit",
        )
        await run(sql, "insert into parked values (4, 'x')")
        await run(sql, "alter table parked rename to orders")
        assert ids(await following(changes)) == [1, 2, 3]
        assert ids(await following(changes)) == [4]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Postgres], Awaitable[None]]:
    """Waits until the next check comes in `check_every`, unless there is a reason."""
    looks = [0, 0]  # begun, ended
    look = Publisher.publish

    async def counted(publisher: Publisher, conn: Sql) -> list[str]:
        looks[0] += 1
        try:
            return await look(publisher, conn)
        finally:
            looks[1] += 1

    monkeypatch.setattr(Publisher, "publish", counted)

    async def wait(pg: Postgres) -> None:
        async def watching() -> bool:
            return looks[0] == looks[1] >= 2 and not pg._restarter.manager._tables_changed.is_set()

        await until(watching)

    return wait


async def test_a_renamed_table_is_noticed_by_the_stream(
    make: MakePostgres,
    sql: Sql,
    stream_id: str,
    settled: Callable[[Postgres], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_manager, "MARKER_EVERY", 3600.0)
    await run(sql, f"create publication {publication(stream_id)} for tables in schema public")
    async with make(check_every=3600.0) as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await settled(pg)
        await run(sql, "drop table orders", f"create table orders {NEW}")
        await run(sql, "insert into orders values (1, 'x')")
        assert "another table" in (await next_reset(changes)).reason


#: Three times as long as documented: other processes may keep the machine busy.
TOLD = 9.0


@pytest.mark.parametrize("fault", some_of(FAULTS, "swapped", "unpublished", "only inserts"))
async def test_a_table_fault_is_told_within_seconds_without_any_change_of_a_row(
    make: MakePostgres,
    sql: Sql,
    stream_id: str,
    fault: str,
    settled: Callable[[Postgres], Awaitable[None]],
) -> None:
    async with make(check_every=3600.0) as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await settled(pg)
        await run(sql, *(each.format(publication=publication(stream_id)) for each in FAULTS[fault]))
        await next_reset(changes, TOLD)


async def test_a_table_that_is_unpublished_as_soon_as_it_was_published_is_told_within_seconds(
    make: MakePostgres, sql: Sql, stream_id: str, settled: Callable[[Postgres], Awaitable[None]]
) -> None:
    async with make(check_every=3600.0) as pg:
        await settled(pg)
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        # The catalog is again as it was before the table was published.
        await run(sql, f"alter publication {publication(stream_id)} drop table orders")
        assert "removed from the publication" in (await next_reset(changes, TOLD)).reason


async def test_a_consumer_of_a_whole_schema_is_told_of_a_missing_table_within_seconds(
    make: MakePostgres, sql: Sql, stream_id: str
) -> None:
    await run(sql, f"create publication {publication(stream_id)} for tables in schema public")
    async with make(check_every=3600.0) as pg:
        changes = pg.changes()
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]
        await run(sql, f"create table other {NEW}", "insert into other values (2, 'x')")
        assert ids(await following(changes)) == [2]
        await until(follows_other(pg, changes), TOLD)
        await run(sql, "drop table other")
        assert "public.other is no longer published" in (await next_reset(changes, TOLD)).reason


async def test_a_table_that_was_created_during_a_check_is_missed_when_it_is_dropped(
    make: MakePostgres, sql: Sql, stream_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the catalog is again as it was when the check began."""
    check_existence, armed = Publisher._check_existence, False

    async def create_before(self: Publisher, conn: Sql) -> None:
        nonlocal armed
        if armed:
            armed = False
            await run(sql, f"create table other {NEW}")
        await check_existence(self, conn)

    monkeypatch.setattr(Publisher, "_check_existence", create_before)
    await run(sql, f"create publication {publication(stream_id)} for tables in schema public")
    async with make(check_every=3600.0) as pg:
        changes = pg.changes()
        await pg.wait_until_published(timeout=LIMIT)
        armed = True
        pg._hub.check_tables()
        await until(follows_other(pg, changes), TOLD)
        await run(sql, "drop table other")
        assert "public.other is no longer published" in (await next_reset(changes, TOLD)).reason


def follows_other(pg: Postgres, changes: Changes) -> Callable[[], Awaitable[bool]]:
    async def so() -> bool:
        return "public.other" in pg._hub.tables.of(changes.name)

    return so


async def test_a_stream_that_sleeps_is_left_asleep_when_a_table_changes(
    make: MakePostgres, sql: Sql
) -> None:
    async with make(sleep_after=0.5) as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)

        async def asleep() -> bool:
            return pg.health is Health.SLEEPING

        await until(asleep)  # although the tables are looked at more often than it may idle
        await run(sql, "drop table orders", f"create table orders {NEW}")
        assert pg.health is Health.SLEEPING
        reset = asyncio.ensure_future(next_reset(changes))
        while not reset.done():
            await pg.wake()  # it may fall asleep before the tables are looked at
            await asyncio.wait([reset], timeout=0.1)
        assert "another table" in reset.result().reason


async def test_a_missing_table_is_waited_for(
    make: MakePostgres, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "drop table orders")

        async def warned() -> bool:
            return "no longer exist: orders;" in caplog.text

        await until(warned)
        await run(sql, f"create table orders {NEW}")
        assert "another table" in (await next_reset(changes)).reason
        await run(sql, "insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]


async def test_no_reset_is_delivered_before_the_tables_are_published_again(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """A copy during a write transaction would miss the changes that it commits."""
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')")
        await until(mirror.agrees)
        rows, slot = mirror.rows, pg.settings.slot_name
    await run(
        sql,
        f"select pg_drop_replication_slot('{slot}')",
        f"alter publication {publication(stream_id)} drop table orders",
    )
    async with connected(streamed_url) as writer:
        async with make() as pg:
            await pg.wait_until_active(LIMIT)  # a new slot would wait for the writer
        await run(writer, "begin", "insert into orders values (2, 'x')")
        async with make() as pg, mirroring(pg, streamed_url) as mirror:
            mirror.rows = rows
            await pg.wait_until_active(LIMIT)
            with pytest.raises(TimeoutError):
                await pg.wait_until_published("orders", timeout=2.0)
            assert mirror.resets == []
            await run(writer, "commit")
            await pg.wait_until_published("orders", timeout=LIMIT)
            await run(sql, "insert into orders values (3, 'x')")
            await until(mirror.agrees)
            assert len(mirror.resets) == 1


async def test_transactions_from_before_a_reset_are_not_delivered_after_it(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """A row whose deletion was not published would stay in the mirror for ever."""
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        hung = pg.changes("hung", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        pg._hub.pressure.queue_length = 0
        await run(sql, "insert into orders values (1, 'x')")

        async def paused() -> bool:
            return pg._hub.full

        await until(paused)
        await run(
            sql,
            "insert into orders values (2, 'not read before the reset')",
            f"alter publication {publication(stream_id)} drop table orders",
            "delete from orders where id = 2",
        )
        await until(lambda: has_resets(mirror, 1))
        await hung.aclose()  # reading goes on
        await run(sql, "insert into orders values (3, 'x')")
        await until(mirror.agrees)


async def test_tables_are_published_again_after_a_reset(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """`wait_until_published` speaks of the time after the reset."""
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published("orders", timeout=LIMIT)
        await pg.sleep()
        await run(
            sql,
            f"select pg_drop_replication_slot('{pg.settings.slot_name}')",
            f"drop publication {publication(stream_id)}",
        )
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')")
        await until(mirror.agrees)
        assert len(mirror.resets) == 1


@pytest.mark.parametrize("name", some_of(["keyless", '"Key ""less"""'], '"Key ""less"""'))
async def test_a_table_without_a_key_gets_a_replica_identity_before_it_is_published(
    make: MakePostgres, sql: Sql, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run(sql, f"create table {name} (id int)", f"insert into {name} values (1)")
    async with make() as pg:
        changes = pg.changes("keyless", tables=[name])
        await pg.wait_until_published(name, timeout=LIMIT)
        assert f"ALTER TABLE {name} REPLICA IDENTITY FULL" in caplog.text
        await run(sql, f"update {name} set id = 2")  # the application goes on
        assert ids(await following(changes)) == [2]


async def test_a_keyless_table_in_a_manual_publication_is_a_warning(
    make: MakePostgres, sql: Sql, stream_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    await run(
        sql,
        "create table keyless (id int)",
        f"create publication {publication(stream_id)} for table keyless",
    )
    async with make() as pg:
        changes = pg.changes(tables=["keyless"])
        await pg.wait_until_published("keyless", timeout=LIMIT)
        (said,) = [each.getMessage() for each in caplog.records if "key" in each.getMessage()]
        assert "ALTER TABLE keyless REPLICA IDENTITY FULL" in said
        await run(sql, "insert into keyless values (1)")
        assert ids(await following(changes)) == [1]


WRONG: list[Any] = [[1], "wide", [""], ["a."], [".a"], [None], ["a\0b"], ["\ud800"]]


async def test_invalid_table_names_are_refused_at_the_call(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        for tables in WRONG:
            with pytest.raises(ValueError, match="tables"):
                pg.changes("wrong", tables=tables)
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]
        assert pg.statistics()["restarts"] == 0


async def test_a_schema_with_a_dot_is_named_in_quotes(make: MakePostgres, sql: Sql) -> None:
    await run(
        sql,
        'create schema "a.b"',
        'create table "a.b"."Odd ""one""" (id int primary key)',
    )
    async with make() as pg:
        changes = pg.changes(tables=['"a.b"."Odd ""one"""'])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, 'insert into "a.b"."Odd ""one""" values (1)')
        assert ids(await following(changes)) == [1]


async def test_waiting_for_a_table_that_was_refused_fails_at_once(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes("wrong", tables=["nothing"])
        orders = pg.changes(tables=["orders"])
        async with asyncio.timeout(LIMIT):
            with pytest.raises(Exception, match="nothing"):
                await pg.wait_until_published("nothing", timeout=3600.0)
            with pytest.raises(Exception, match="nothing"):
                await pg.wait_until_published(timeout=3600.0)
            await pg.wait_until_published("orders", timeout=3600.0)
            await changes.aclose()
            await pg.wait_until_published(timeout=3600.0)
        await orders.aclose()


async def test_many_consumers_of_many_tables_are_published_at_once(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query, one change of the publication and one write for all of them."""
    kept: list[int] = []
    follow = StateStore.follow

    def keeping(store: StateStore, followed: Mapping[str, str]) -> None:
        kept.append(len(followed))
        follow(store, followed)

    monkeypatch.setattr(StateStore, "follow", keeping)
    names = [f"t{number}" for number in range(20)]
    await run(sql, *(f"create table {name} {NEW}" for name in names))
    queries = 0
    execute = type(sql).execute

    async def counting(*args: Any, **options: Any) -> Any:
        nonlocal queries
        queries += 1
        return await execute(*args, **options)

    monkeypatch.setattr(type(sql), "execute", counting)
    async with make() as pg:
        here = [pg.changes(f"c{number}", tables=names) for number in range(40)]
        await pg.wait_until_published(timeout=LIMIT)
        assert queries < 40
        await pg.sleep()
        assert sum(kept) >= 40
        assert len(kept) < 10
        queries = 0
        await pg.wait_until_published(timeout=LIMIT)
        assert queries < 40
        assert len(here) == 40
