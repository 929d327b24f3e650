"""Publications: what is added, removed, repaired and refused, and what consumers are told."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers import require_server
from tests.soaking import some_of

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Recorder
from moored.postgres import (
    Changes,
    ConfigurationError,
    History,
    Postgres,
    Reset,
    StreamEnded,
    Transaction,
)
from moored.postgres._settings import Settings
from moored.postgres.consume import Hub, Publisher, StateStore
from moored.postgres.server import diagnose
from moored.testing import scaled

from .conftest import MakePostgres, Sql
from .mirror import mirroring
from .server import LIMIT, connected, following, ids, next_reset, one, quicken, until, walsender


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Below full scale each test runs on the newest PostgreSQL or on an installed, older one.

    Those of a missing publication run on both: from 18 on, it does not end the stream.
    """
    name, versions = metafunc.function.__name__, ["18", "installed", "16"]
    if scaled(100) < 100:
        both = "missing_publication" in name
        versions = versions[:2] if both else [versions[zlib.crc32(name.encode()) % 2]]
    metafunc.parametrize("postgres", versions, indirect=True, scope="module")


@pytest.fixture(scope="module")
def postgres(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """A server of the version that the test is for."""
    if request.param == "installed":
        server = SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent)
    elif request.param == "18":
        yield request.getfixturevalue("postgres")  # that of all tests
        return
    else:
        server = SyncEmbeddedPostgres(version=int(request.param))
    with server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def make(make: MakePostgres) -> MakePostgres:
    return partial(make, check_every=0.2)


async def run(conn: Sql, *statements: str) -> None:
    for statement in statements:
        await conn.execute(statement.encode())


async def members(sql: Sql, pg: Postgres) -> list[str]:
    """The tables that the publication lists."""
    query = "select tablename from pg_publication_tables where pubname = %s order by 1"
    cursor = await sql.execute(query, (pg.settings.publication_name,))
    return [row[0] for row in await cursor.fetchall()]


def listed(sql: Sql, pg: Postgres, *tables: str) -> Callable[[], Awaitable[bool]]:
    async def so() -> bool:
        return await members(sql, pg) == sorted(tables)

    return so


async def refusal(changes: Changes) -> str:
    with pytest.raises(ConfigurationError) as caught:
        await asyncio.wait_for(anext(changes), LIMIT)
    return str(caught.value)


async def carry_out(sql: Sql, text: str) -> str:
    """Run the statements that an error names; return them."""
    found = re.search(r"\brun ((?:BEGIN|CREATE|ALTER).*?)(?:\.(?= )| as the database|$)", text)
    assert found is not None, text
    await run(sql, found[1])
    return found[1]


# -- tables come and go with their consumers -------------------------------------------------------


async def test_a_table_is_removed_with_the_last_consumer_that_follows_it(
    make: MakePostgres, sql: Sql
) -> None:
    await run(sql, "create table other (id int primary key)")
    async with make() as pg:
        first, second = (
            pg.changes("first", tables=["orders"]),
            pg.changes("second", tables=["orders"]),
        )
        third = pg.changes("third", tables=["other"])
        await pg.wait_until_published(timeout=LIMIT)
        await second.aclose()  # it is still known, and the server keeps its transactions
        await pg.drop_consumer("first")
        await check_twice(pg)
        assert await members(sql, pg) == ["orders", "other"]
        await pg.drop_consumer("second")
        await until(listed(sql, pg, "other"))
        again = pg.changes("again", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')", "insert into other values (2)")
        assert ids(await following(again)) == [1]
        assert ids(await following(third)) == [2]
        assert pg.statistics()["restarts"] == 0
        del first


async def check_twice(pg: Postgres) -> None:
    """Wait until the tables were checked twice: the first check may have begun before."""
    publisher = pg._restarter.manager._publisher
    publish, done = publisher.publish, asyncio.Semaphore(0)

    async def counted(conn: Sql) -> list[str]:
        waiting = await publish(conn)
        done.release()
        return waiting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "publish", counted)
        for _ in range(2):
            await asyncio.wait_for(done.acquire(), LIMIT)


async def test_a_table_that_was_added_by_hand_is_never_removed(
    make: MakePostgres, sql: Sql
) -> None:
    await run(sql, "create table other (id int primary key)")
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        await run(sql, f"alter publication {pg.settings.publication_name} add table other")
        changes = pg.changes("both", tables=["orders", "other"])
        await pg.wait_until_published(timeout=LIMIT)
        del changes
        await pg.drop_consumer("both")
        await until(listed(sql, pg, "other"))
        await check_twice(pg)
        assert await members(sql, pg) == ["other"]


async def test_no_table_is_removed_while_the_tables_of_a_consumer_are_unknown(
    make: MakePostgres, sql: Sql
) -> None:
    """After a reset of all consumers, one that is away may still need the table."""
    async with make() as pg:
        away, here = pg.changes("away", tables=["orders"]), pg.changes("here", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await away.aclose()
        await pg._hub.reset("of a test")
        await next_reset(here)
        await pg.drop_consumer("here")
        await check_twice(pg)
        assert await members(sql, pg) == ["orders"]


async def test_several_streams_publish_the_same_tables_without_a_deadlock(
    make: MakePostgres, sql: Sql, stream_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"t{number}" for number in range(5)]
    await run(sql, *(f"create table {name} (id int primary key)" for name in names))
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(
                make(stream_id=f"{stream_id}_{each}", state_dir=tmp_path / each)
            )
            for each in ("a", "b", "c")
        ]
        await asyncio.gather(*(pg.wait_until_active(LIMIT) for pg in streams))
        here = [
            pg.changes(tables=sorted(names, reverse=n % 2 == 1)) for n, pg in enumerate(streams)
        ]
        await asyncio.gather(*(pg.wait_until_published(timeout=LIMIT) for pg in streams))
        assert "deadlock" not in caplog.text
        await run(sql, "insert into t3 values (1)")
        assert [ids(await following(changes)) for changes in here] == [[1]] * 3


async def test_the_first_start_on_a_busy_database_beside_a_partitioned_table_is_no_reset(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    """Tables that are published one by one are confirmed before the publication is changed."""
    await run(
        sql,
        "create table sales (id int primary key) partition by range (id)",
        "create table sales_1 partition of sales for values from (0) to (100)",
    )
    waiting = "select exists (select 1 from pg_locks where not granted and mode like %s)"
    async with connected(streamed_url) as writer, make() as pg:
        await pg.wait_until_active(LIMIT)
        await run(writer, "begin", "insert into orders values (1, 'x')")
        changes = pg.changes(tables=["orders", "sales"])
        await until(lambda: one(sql, waiting, "ShareRowExclusiveLock"))
        await run(writer, "commit")
        await pg.wait_until_published(timeout=LIMIT)
        await check_twice(pg)
        await run(sql, "insert into orders values (2, 'y')", "insert into sales values (3)")
        found = [item async for item in first(changes, 2)]
        assert [ids(item) for item in found if isinstance(item, Transaction)] == [[2], [3]], found


async def first(changes: Changes, number: int) -> AsyncIterator[Transaction | Reset]:
    async with asyncio.timeout(LIMIT):
        for _ in range(number):
            yield await anext(changes)


# -- replica identity ------------------------------------------------------------------------------


async def test_partitions_without_a_key_get_a_replica_identity(
    make: MakePostgres, sql: Sql
) -> None:
    await run(
        sql,
        "create table sales (id int, region text) partition by list (region)",
        "create table north partition of sales for values in ('north')",
        "create table south (id int primary key, region text)",
        "alter table sales attach partition south for values in ('south')",
    )
    async with make() as pg:
        changes = pg.changes(tables=["sales"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "insert into sales values (1, 'north'), (2, 'south')")
        assert ids(await following(changes)) == [1, 2]
        await run(sql, "update sales set id = id + 2")
        assert ids(await following(changes)) == [3, 4]
        identities = "select string_agg(relreplident::text, '' order by relname) from pg_class "
        assert await one(sql, identities + "where relname in ('north', 'south')") == "fd"


# -- users who do not own everything ---------------------------------------------------------------


@asynccontextmanager
async def user(sql: Sql, url: str, stream_id: str) -> AsyncIterator[str]:
    """Create a role that may replicate, and owns nothing; yield its URL."""
    known = psycopg.conninfo.conninfo_to_dict(url)
    name = f"reader_{stream_id}"
    await run(sql, f"create role {name} login replication password 'x'")
    try:
        yield url.replace(f"{known['user']}:{known['password']}@", f"{name}:x@")
    finally:
        ended = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s"
        await sql.execute(ended, (name,))
        await run(sql, f"reassign owned by {name} to current_user", f"drop owned by {name}")
        await run(sql, f"drop role {name}")


async def streams(changes: Changes, sql: Sql, pg: Postgres) -> None:
    """Check that the consumer gets what is written to its table from now on."""
    await pg.wait_until_published(*changes.tables, timeout=LIMIT)
    await run(sql, "truncate orders", "insert into orders values (1, 'x')")
    while True:
        txn = await following(changes)
        await txn.ack()
        if ids(txn) == [1]:
            return


async def test_manual_publishing_names_what_is_missing_step_by_step(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "stream_id": stream_id,
        "state_dir": tmp_path,
        "pool_size": 2,
        "check_every": 0.2,
        "manual_publication": True,
        "publication": "By hand",
    }
    async with user(sql, streamed_url, stream_id) as url:
        async with Postgres(url, **options) as pg:
            said = await refusal(pg.changes(tables=["orders"]))
            await carry_out(sql, said)
        async with Postgres(url, **options) as pg:
            said = await refusal(pg.changes(tables=["orders"]))
            assert "does not publish all changes of public.orders" in said
            assert "LOCK TABLE" in await carry_out(sql, said)
            changes = pg.changes(tables=["orders"])
            await streams(changes, sql, pg)
            await run(sql, "alter publication \"By hand\" set (publish = 'insert')")
            said = await refusal(changes)  # within the periodic check
            assert "SET (publish" in await carry_out(sql, said)
            changes = pg.changes(tables=["orders"])
            await next_reset(changes)  # updates and deletes may be missing
            await streams(changes, sql, pg)
            await run(sql, 'alter publication "By hand" drop table orders')
            await carry_out(sql, await refusal(changes))
            changes = pg.changes(tables=["orders"])
            await next_reset(changes)
            await streams(changes, sql, pg)
            await pg.drop_consumer("default")
            await check_twice(pg)
            assert await members(sql, pg) == ["orders"]
            assert pg.statistics()["restarts"] == 0


async def test_a_user_who_owns_nothing_is_told_what_the_owner_must_do(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    name = f"moored_publication_{stream_id}"
    options: dict[str, Any] = {
        "stream_id": stream_id,
        "state_dir": tmp_path,
        "pool_size": 2,
        "check_every": 0.2,
    }
    async with user(sql, streamed_url, stream_id) as url:
        async with Postgres(url, **options) as pg:
            said = await refusal(pg.changes(tables=["orders"]))
            assert "GRANT CREATE ON DATABASE" in said
            await carry_out(sql, said)
        async with Postgres(url, **options) as pg:
            said = await refusal(pg.changes(tables=["orders"]))
            assert "permission denied for table orders" in said
            await run(sql, f"alter table orders owner to reader_{stream_id}")
            said = await refusal(pg.changes(tables=["orders"]))
            assert f"must be owner of publication {name}" in said
            await carry_out(sql, said)
            changes = pg.changes(tables=["orders"])
            await streams(changes, sql, pg)
            await run(sql, f"alter publication {name} set (publish = 'insert, update')")
            said = await refusal(changes)
            assert f"must be owner of publication {name}" in said
            await carry_out(sql, said)
            changes = pg.changes(tables=["orders"])
            await next_reset(changes)
            await streams(changes, sql, pg)
            assert pg.statistics()["restarts"] == 0


async def test_an_owner_of_the_publication_who_does_not_own_a_table(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with user(sql, streamed_url, stream_id) as url:
        await run(
            sql,
            "create table other (id int primary key)",
            f"grant all on orders, other to reader_{stream_id}",
            "create publication mine for table other",
            f"grant create on database {sql.info.dbname} to reader_{stream_id}",
            f"alter publication mine owner to reader_{stream_id}",
        )
        options: dict[str, Any] = {"state_dir": tmp_path, "pool_size": 2, "check_every": 0.2}
        async with Postgres(url, stream_id=stream_id, publication="mine", **options) as pg:
            other = pg.changes("other", tables=["other"])
            said = await refusal(pg.changes("orders", tables=["orders"]))
            assert "must be owner of table orders" in said
            await carry_out(sql, said)
            orders = pg.changes("orders", tables=["orders"])
            await streams(orders, sql, pg)
            await run(sql, "insert into other values (1)")
            assert ids(await following(other)) == [1]
            await run(
                sql,
                "begin; drop table orders; create table orders (id int primary key, name text); "
                "alter publication mine add table orders; commit",
            )
            assert "another table" in (await next_reset(orders)).reason
            await streams(orders, sql, pg)


# -- what others do to publication, slot and tables ------------------------------------------------


async def test_a_missing_publication_is_noticed_without_a_change_of_a_table(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, f"drop publication {pg.settings.publication_name}")

        async def told() -> bool:
            return bool(mirror.resets)

        await until(told)
        assert "the publication does not exist" in mirror.resets[0]
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x')")
        await until(mirror.agrees)


async def test_a_missing_publication_is_noticed_without_a_change_and_without_named_tables(
    make: MakePostgres, sql: Sql
) -> None:
    add = "alter publication {} add table orders"
    async with make() as pg, pg.changes() as changes:
        await pg.wait_until_active(LIMIT)
        name = pg.settings.publication_name
        await run(sql, add.format(name), "insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]
        await run(sql, f"drop publication {name}")
        assert "the publication does not exist" in (await next_reset(changes)).reason
        await run(sql, add.format(name), "insert into orders values (2, 'x')")
        assert ids(await following(changes)) == [2]


@pytest.mark.parametrize("manual", [False, True], ids=["own", "manual"])
async def test_a_missing_publication_that_was_created_again_is_a_reset(
    make: MakePostgres, sql: Sql, streamed_url: str, manual: bool
) -> None:
    """The WAL of that time cannot be decoded: without a new slot, the stream would never go on."""
    name = "by_hand"
    await run(sql, f"create publication {name} for table orders")
    async with (
        make(publication=name, manual_publication=manual) as pg,
        mirroring(pg, streamed_url) as mirror,
    ):
        await pg.wait_until_published(timeout=LIMIT)
        await run(
            sql,
            f"drop publication {name}",
            "insert into orders values (1, 'x')",
            f"create publication {name} for table orders",
            "insert into orders values (2, 'x')",
        )

        async def told() -> bool:
            return bool(mirror.resets)

        await until(told)
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (3, 'x')", "delete from orders where id = 1")
        await until(mirror.agrees)


async def test_a_manual_publication_that_is_dropped_is_waited_for(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    await run(sql, "create publication by_hand for table orders")
    async with (
        make(publication="by_hand", manual_publication=True) as pg,
        mirroring(pg, streamed_url) as mirror,
    ):
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "drop publication by_hand")

        async def explained() -> bool:
            return 'CREATE PUBLICATION "by_hand"' in pg.explain()

        await until(explained)
        await run(sql, "create publication by_hand for table orders")
        await pg.wait_until_published("orders", timeout=LIMIT)
        await run(sql, "insert into orders values (3, 'x')")
        await until(mirror.agrees)
        assert mirror.resets


async def test_a_slot_dropped_while_it_is_streamed_is_a_reset(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with make() as pg, mirroring(pg, streamed_url) as mirror:
        await pg.wait_until_published(timeout=LIMIT)
        await until(lambda: walsender(sql, pg))
        slot = pg.settings.slot_name

        async def dropped() -> bool:
            try:
                await sql.execute(
                    "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots "
                    "where slot_name = %s and active",
                    (slot,),
                )
                await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
            except psycopg.errors.ObjectInUse:
                return False
            return True

        await until(dropped)
        await run(sql, "insert into orders values (1, 'x')")

        async def told() -> bool:
            return bool(mirror.resets)

        await until(told)
        assert "slot was missing" in mirror.resets[0]
        await run(sql, "insert into orders values (2, 'x')")
        await until(mirror.agrees)


async def test_the_check_of_the_publication_finds_a_missing_slot(
    streamed_url: str, sql: Sql, tmp_path: Path
) -> None:
    """A slot that is read cannot be dropped: this is for a stream whose loss was not noticed."""
    settings = Settings(database_url="", replication_url="", state_dir=tmp_path, stream_id="gone")
    await run(sql, f"create publication {settings.publication_name}")
    with closing(StateStore(tmp_path / "state.db")) as store:
        hub = Hub(store, Recorder())
        hub.begin(History("1", 1), 1000)
        async with hub.attach("c"), await psycopg.AsyncConnection.connect(streamed_url) as conn:
            with pytest.raises(StreamEnded, match='slot "moored_slot_gone" does not exist') as end:
                await Publisher(hub, settings).publish(conn)
    assert diagnose(end.value).type == "missing_slot"


async def test_a_renamed_table_is_reported_and_continues_when_it_is_renamed_back(
    make: MakePostgres, sql: Sql
) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "alter table orders rename to parked")

        async def explained() -> bool:
            return "the consumer 'default' waits for orders: " in pg.explain()

        await until(explained)
        await run(sql, "insert into parked values (1, 'x')", "alter table parked rename to orders")
        assert ids(await following(changes)) == [1]

        async def done() -> bool:
            return "waits for" not in pg.explain()

        await until(done)


REWRITES = {
    "a default": "alter table orders add price int not null default 5",
    "a volatile default": "alter table orders add at timestamptz default clock_timestamp()",
    "an identity": "alter table orders add number int generated always as identity",
    "another type": "alter table orders alter name type bytea using convert_to(name, 'utf8')",
    "another scale": "alter table orders alter total type numeric(10, 1)",
}


@pytest.mark.parametrize("kind", some_of(REWRITES, "a volatile default", "another scale"))
async def test_columns_that_change_the_rows_are_a_reset_with_the_next_change(
    make: MakePostgres, sql: Sql, kind: str
) -> None:
    await run(sql, "alter table orders add total numeric(10, 2)")
    by_stream = kind != "another scale"
    async with make(check_every=3600.0 if by_stream else 0.2) as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(sql, "insert into orders values (1, 'x', 1.23)")
        assert ids(await following(changes)) == [1]
        await run(sql, REWRITES[kind], "insert into orders (id) values (2)")
        while not isinstance(item := await asyncio.wait_for(anext(changes), LIMIT), Reset):
            assert ids(item) == [2]
        assert "has changed the rows of public.orders" in item.reason
        await run(sql, "insert into orders (id) values (3)")
        assert ids(await following(changes)) == [3]


async def test_columns_that_leave_the_rows_alone_are_no_reset(make: MakePostgres, sql: Sql) -> None:
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await run(
            sql,
            "alter table orders add note varchar(20), add extra int",
            "insert into orders values (1, 'x')",
            "alter table orders alter note type varchar(40)",
            "alter table orders rename name to title",
            "insert into orders values (2, 'y')",
            "alter table orders drop title",
            "insert into orders values (3)",
        )
        assert [ids(await following(changes)) for _ in range(3)] == [[1], [2], [3]]
        await check_twice(pg)
        await run(sql, "insert into orders values (4)")
        assert ids(await following(changes)) == [4]
