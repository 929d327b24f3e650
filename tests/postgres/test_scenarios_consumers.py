"""Consumers that attach, detach and stop reading at bad moments of a stream."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import psycopg
import pytest

from moored.kernel import Recorder
from moored.postgres import (
    Changes,
    History,
    Lsn,
    Postgres,
    PostgresError,
    Reset,
    Transaction,
)
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._store import StateStore
from moored.postgres.decode._body import Body
from moored.postgres.decode._transaction import Committed

from .conftest import MakePostgres, Sql
from .server import (
    LIMIT,
    ConsumerProcess,
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


async def fill(conn: Sql, first: int, number: int) -> None:
    """So many transactions of one row each."""
    texts = [f"insert into orders values ({first + n}, 'x'); commit; begin" for n in range(number)]
    await conn.execute(("begin; " + "; ".join(texts) + "; commit").encode())


async def test_attaching_again_under_load_misses_nothing(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """Transactions in flight while it attaches are newer than those that it needs."""
    async with make() as pg:
        other, seen_by_other = pg.changes("other", tables=["orders"]), list[int]()
        await published(streamed_url, stream_id)
        seen: list[int] = []
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            flood = tasks.create_task(flood_of(sql))
            taking = tasks.create_task(take(other, seen_by_other, 10**9))
            for _ in range(4):
                async with pg.changes("search", tables=["orders"]) as changes:
                    await take(changes, seen, 50)
                await asyncio.sleep(0.1)  # it misses some
            flood.cancel()
            taking.cancel()
        assert len(seen) == 200
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        assert seen_by_other == list(range(len(seen_by_other)))


async def flood_of(conn: Sql) -> None:
    """Transactions without an end, some hundreds a second."""
    for first in itertools.count(step=10):
        await fill(conn, first, 10)
        await asyncio.sleep(0.01)


async def take(changes: Changes, seen: list[int], number: int) -> None:
    """Take and acknowledge so many transactions."""
    for _ in range(number):
        txn = await anext(changes)
        assert isinstance(txn, Transaction)
        seen += ids(txn)
        await txn.ack()


def test_transactions_in_flight_while_attaching_again_are_not_skipped(tmp_path: Path) -> None:
    hub = Hub(StateStore(tmp_path / "state.db"), Recorder())
    hub.pressure.queue_length = 0
    history = History("1", 1)
    hub.begin(history, 100)
    changes = hub.attach("search")
    apply(hub, 110)
    assert taken(changes) == [110]
    assert hub.acknowledge(changes._attachment, 110)
    changes._closed = True
    hub.detach(changes)
    apply(hub, 120)
    changes = hub.attach("search")
    apply(hub, 130)  # it was received already, before the stream was cut
    assert taken(changes) == []
    hub.begin(history, 110)
    apply(hub, 120, 130, 140)
    assert taken(changes) == [120, 130, 140]
    hub._store.close()


def apply(hub: Hub, *ends: int) -> None:
    for end in ends:
        hub.apply_all([Committed(1, Body(), {}, end - 5, end)])


def taken(changes: Changes) -> list[int]:
    found = [int(item.position.lsn) for item in changes._queue if isinstance(item, Transaction)]
    changes._queue.clear()
    return found


async def test_a_start_that_the_server_has_discarded_is_a_reset(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """The user's database may have been restored to before the acknowledged position."""
    async with make() as pg:
        changes = pg.changes("copy", tables=["orders"])
        await published(streamed_url, stream_id)
        positions = []
        for number in (1, 2, 3):
            await sql.execute("insert into orders values (%s, 'x')", (number,))
            txn = await following(changes)
            positions.append(txn.position)
            await txn.ack()
        query = (
            "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots "
            "where slot_name = %s"
        )
        await until(lambda: one(sql, query, str(positions[2].lsn), pg.settings.slot_name))
    async with make() as pg:
        changes = pg.changes("copy", tables=["orders"], start=positions[0])
        reset = await next_reset(changes)
        assert str(positions[0].lsn) in reset.reason
        asking = asyncio.create_task(following(changes))
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (4, 'x')")
        assert ids(await asking) == [4]
    async with make() as pg:
        await pg.wait_until_active(LIMIT)  # the stream is under way when it comes
        changes = pg.changes("copy", tables=["orders"], start=positions[0])
        assert str(positions[0].lsn) in (await next_reset(changes)).reason


async def test_a_start_beyond_the_end_is_a_reset_while_streaming(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """Only the consumer with that start gets the reset."""
    async with make() as pg:
        other = pg.changes("other", tables=["orders"])
        await published(streamed_url, stream_id)
        await sql.execute("insert into orders values (1, 'x')")
        position = (await following(other)).position
        far = position._replace(lsn=Lsn(position.lsn + 10**9))
        changes = pg.changes("far", tables=["orders"], start=far)
        assert "beyond the end" in (await next_reset(changes)).reason
        await sql.execute("insert into orders values (2, 'x')")
        while ids(await following(changes)) != [2]:
            pass  # it begins where the server can, which may be before the other one
        assert ids(await following(other)) == [2]


async def test_a_start_before_the_slot_is_a_reset_while_streaming(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with make() as pg:
        changes = pg.changes("copy", tables=["orders"])
        await published(streamed_url, stream_id)
        await sql.execute("insert into orders values (1, 'x')")
        txn = await following(changes)
        await pg.drop()
    await sql.execute("insert into orders values (2, 'lost')")
    async with make(state_dir=tmp_path / "another") as pg:
        await pg.wait_until_active(LIMIT)
        changes = pg.changes("copy", tables=["orders"], start=txn.position)
        assert "older than the replication slot" in (await next_reset(changes)).reason


async def test_a_loop_whose_body_fails_can_be_retried(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        seen: list[int] = []

        async def follow() -> None:
            while True:
                try:
                    async for txn in pg.changes("search", tables=["orders"]):
                        assert isinstance(txn, Transaction)
                        seen.extend(ids(txn))
                        if len(seen) < 4:
                            raise ValueError("the handler fails")
                        await txn.ack()
                        return
                except ValueError:
                    await asyncio.sleep(0)

        following_it = asyncio.create_task(follow())
        await published(streamed_url, stream_id)
        await sql.execute("insert into orders values (1, 'x')")
        await asyncio.wait_for(following_it, LIMIT)
        assert seen == [1, 1, 1, 1]


async def test_a_waiting_consumer_that_is_dropped_gets_an_error(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await published(streamed_url, stream_id)
        asking = asyncio.create_task(following(changes))
        await asyncio.sleep(0)
        await pg.drop_consumer("search")
        with pytest.raises(PostgresError, match="was dropped"):
            await asking
        async with pg.changes("search", tables=["orders"]) as again:
            await sql.execute("insert into orders values (1, 'x')")
            assert ids(await following(again)) == [1]


async def test_the_connection_survives_while_reading_is_paused(tmp_path: Path) -> None:
    async with (
        own_server(wal_sender_timeout="3s") as server,
        connected(server.url) as conn,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await published(server.url, "default")
        await pg.wait_until_active(LIMIT)
        pg._hub.pressure.queue_length = 10
        await until(lambda: walsender(conn, pg))
        before = await walsender(conn, pg)
        total = 500
        await fill(conn, 0, total)
        await conn.execute(
            "insert into orders select n, repeat('x', 1000) from generate_series(10000, 20000) n"
        )
        await asyncio.sleep(7)  # twice as long as the server waits for a sign of life
        assert len(changes._queue) < total
        seen = [ids(await following(changes))[0] for _ in range(total)]
        assert seen == list(range(total))
        assert len(ids(await following(changes))) == 10001
        assert await walsender(conn, pg) == before


async def test_a_reset_while_the_queue_is_full_resumes_reading(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.postgres.stream._replication.SILENCE", 0.3)
    async with make() as pg:
        changes = pg.changes("slow", tables=["orders"])
        await published(streamed_url, stream_id)
        pg._hub.pressure.queue_length = 5
        await fill(sql, 0, 50)
        await until(lambda: full(pg))
        await until(lambda: lose_slot(sql, pg.settings.slot_name))
        await until(lambda: was_reset(pg, "slow"))
        while not isinstance(item := await asyncio.wait_for(anext(changes), LIMIT), Reset):
            assert isinstance(item, Transaction)
        asking = asyncio.create_task(following(changes))
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (1000, 'x')")
        assert ids(await asking) == [1000]


async def full(pg: Postgres) -> bool:
    return pg._hub.full


async def was_reset(pg: Postgres, name: str) -> bool:
    return pg._hub.consumers()[name]["reset"] is not None


async def lose_slot(sql: Sql, slot: str) -> bool:
    """Drop the slot as soon as its reader is gone."""
    query = (
        "select pg_terminate_backend(active_pid) from pg_replication_slots "
        "where slot_name = %s and active_pid is not null"
    )
    await sql.execute(query, (slot,))
    try:
        await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True


@pytest.mark.soak  # other tests stream large transactions, on every version
async def test_an_exceedingly_large_transaction(
    streamed_url: str, stream_id: str, sql: Sql, tmp_path: Path
) -> None:
    consumer = ConsumerProcess(streamed_url, "count", tmp_path, stream_id=stream_id)
    with consumer:
        await published(streamed_url, stream_id)
        rows = 300_000
        await sql.execute(
            f"insert into orders select n, repeat('x', 200) from generate_series(1, {rows}) n"
        )
        await until(lambda: counted(consumer))
    (told,) = consumer.read_json()
    assert told["changes"] == rows
    assert told["grown_mb"] < 60  # it came as 75 MB


async def counted(consumer: ConsumerProcess) -> bool:
    assert not consumer.ended
    return bool(consumer.lines())


def test_a_stored_position_never_decreases(tmp_path: Path) -> None:
    """Two checkpoints at once may be written in any order; the server remembers the later one."""
    store = StateStore(tmp_path / "state.db")
    store.save(Lsn(200), {})
    store.save(Lsn(100), {})
    assert store.confirmed() == Lsn(200)
    store.reset("another history")
    store.save(Lsn(300), {})  # by one who has not heard of it
    assert store.confirmed() is None
    store.save(Lsn(50), {}, times_reset=1)
    assert store.confirmed() == Lsn(50)
    store.close()
