"""Lost slots, lost state directories, and processes that share a state directory."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Recorder
from moored.postgres import (
    Changes,
    ConfigurationError,
    History,
    Lsn,
    Position,
    Postgres,
    Reset,
    SchemaChanged,
    StreamEnded,
    Transaction,
)
from moored.postgres.consume import _store
from moored.postgres.consume._hub import Hub
from moored.postgres.consume._store import StateStore
from moored.postgres.decode._body import Body
from moored.postgres.decode._transaction import Committed
from moored.postgres.report._health import Health

from .clusters import Seen, cluster
from .conftest import MakePostgres, Sql
from .server import (
    LIMIT,
    ConsumerProcess,
    confirm_all,
    following,
    ids,
    next_reset,
    one,
    published,
    quicken,
    until,
)

LIVES = "select wal_status <> 'lost' from pg_replication_slots where slot_name = %s"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, check_every=0.2)


async def insert(sql: Sql, *numbers: int) -> None:
    for number in numbers:
        await sql.execute("insert into orders values (%s, 'x')", (number,))


async def confirmed(sql: Sql, pg: Postgres, at: Position) -> None:
    """Wait until everything up to here was confirmed to the server."""
    query = (
        "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    )
    await until(lambda: one(sql, query, str(at.lsn), pg.settings.slot_name))


# -- the slot ------------------------------------------------------------------------------------


@pytest.mark.parametrize("acknowledges", [True, False])
async def test_a_slot_recreated_by_another_program_is_a_reset(
    make: MakePostgres, sql: Sql, acknowledges: bool
) -> None:
    """Also for a consumer that has never acknowledged anything."""
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        txn = await following(changes)
        if acknowledges:
            await txn.ack()
            await confirmed(sql, pg, txn.position)
        slot = pg.settings.slot_name
    await insert(sql, 2)
    await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
    await sql.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        assert "has moved the replication slot" in (await next_reset(changes)).reason
        asking = asyncio.create_task(following(changes))
        await insert(sql, 3)
        assert ids(await asking) == [3]


async def test_a_process_killed_before_its_reset_resets_again(
    sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """The next process finds a slot whose only difference is its position."""
    consumer = ConsumerProcess(streamed_url, "ids", tmp_path, stream_id=stream_id, acks=False)
    with consumer:
        await published(streamed_url, stream_id)
        await insert(sql, 1)
        await until(lambda: last_of(consumer, "1"))
    await until(lambda: dropped(sql, f"moored_slot_{stream_id}"))
    assert await consumer.run_to_its_end(dies=("before", "check")) == -signal.SIGKILL
    await insert(sql, 2)
    with consumer:
        await until(lambda: last_of(consumer, "2"))
    first, reset, last = consumer.lines()
    assert (first, last) == ("1", "2")
    assert reset.startswith("reset another program has moved the replication slot")


async def last_of(consumer: ConsumerProcess, line: str) -> bool:
    assert not consumer.ended, consumer.log.read_text()
    return consumer.lines()[-1:] == [line]


async def dropped(sql: Sql, slot: str) -> bool:
    """Drop a slot as soon as it is inactive."""
    try:
        await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True


@pytest.mark.parametrize("whose", ["physical", "of another database"])
async def test_a_foreign_slot_of_the_same_name_is_left_alone(
    make: MakePostgres, sql: Sql, stream_id: str, postgres: SyncEmbeddedPostgres, whose: str
) -> None:
    """Names are of the whole server: another database's service may have chosen the same."""
    slot = f"moored_slot_{stream_id}"
    elsewhere = sql if whose == "physical" else await psycopg.AsyncConnection.connect(postgres.url)
    await elsewhere.execute(
        "select pg_create_physical_replication_slot(%s)"
        if whose == "physical"
        else "select pg_create_logical_replication_slot(%s, 'pgoutput')",
        (slot,),
    )
    try:
        async with make() as pg:
            with pytest.raises(ConfigurationError, match="choose another stream_id"):
                await pg.wait_until_active(LIMIT)
        assert await one(sql, "select 1 from pg_replication_slots where slot_name = %s", slot)
    finally:
        await sql.execute("select pg_drop_replication_slot(%s)", (slot,))
        await elsewhere.close()


async def test_a_reset_for_a_lost_slot_is_delivered_with_the_new_slot(tmp_path: Path) -> None:
    """A copy that is taken before there is a slot would miss what is written between the two."""
    async with (
        cluster(idle_replication_slot_timeout="1s") as db,
        Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published("orders")
        slot = pg.settings.slot_name
        await pg.sleep()
        await until(lambda: invalidated(db.url, slot))
        await db.insert(1)
        await pg.wake()
        assert "slot" in (await next_reset(changes)).reason
        assert await db.ask(LIVES, slot)
        await db.insert(2)
        assert ids(await following(changes)) == [2]


async def invalidated(url: str, slot: str) -> bool:
    """Let the server invalidate slots that are too far behind."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute("checkpoint")
        return await one(conn, LIVES, slot) is False


async def test_a_process_killed_while_it_drops_a_lost_slot_resets_again(tmp_path: Path) -> None:
    async with cluster(idle_replication_slot_timeout="1s") as db:
        consumer = ConsumerProcess(db.url, "ids", tmp_path)
        with consumer:
            await published(db.url, "ids")
            await db.insert(1)
            await until(lambda: last_of(consumer, "1"))
        slot = "moored_slot_ids"
        for place in (("before", "drop_slot"), ("after", "drop_slot"), ("after", "hub.reset")):
            if place[0] == "before":
                await until(lambda: invalidated(db.url, slot))
            assert await consumer.run_to_its_end(dies=place) == -signal.SIGKILL
        await db.insert(2)
        with consumer:
            await until(lambda: last_of(consumer, "2"))
        first, *resets, last = consumer.lines()
        assert (first, last) == ("1", "2")
        assert resets
        assert all(line.startswith("reset ") for line in resets)


# -- the directory -------------------------------------------------------------------------------


async def test_with_a_lost_state_dir_consumers_attached_at_the_start_lose_nothing(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1, 2, 3)
        txn = await following(changes)
        await txn.ack()
        await confirmed(sql, pg, txn.position)
    shutil.rmtree(tmp_path)
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        assert ids(await following(changes)) == [2]
        assert ids(await following(changes)) == [3]


async def test_with_a_lost_state_dir_consumers_attached_later_get_a_reset(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    """Their unacknowledged transactions may be lost, and their names are unknown."""
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        txn = await following(changes)
        assert ids(txn) == [1]
    shutil.rmtree(tmp_path)
    async with make() as pg:
        # The first one has passed by again, and there was nobody to take it.
        await until(lambda: received(pg, txn.position.lsn))
        changes = pg.changes("search", tables=["orders"])
        assert "was lost" in (await next_reset(changes)).reason
        asking = asyncio.create_task(following(changes))
        await pg.wait_until_published("orders")
        await insert(sql, 2)
        txn = await asking
        assert ids(txn) == [2]
        await txn.ack()
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await insert(sql, 3)
        assert ids(await following(changes)) == [3]


async def received(pg: Postgres, place: Lsn) -> bool:
    so_far = pg.statistics()["received"]
    return so_far is not None and Lsn.parse(so_far) >= place


async def test_with_a_lost_state_dir_an_existing_start_is_used(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    """A new machine, with a position from the user's own database."""
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        txn = await following(changes)
        await txn.ack()
        # The log goes on, with nothing in it for anybody.
        await sql.execute("select pg_logical_emit_message(false, 'x', 'y', true)")
        here = Lsn.parse(str(await one(sql, "select pg_current_wal_lsn()")))
        await confirmed(sql, pg, txn.position._replace(lsn=here))
    await insert(sql, 2)
    shutil.rmtree(tmp_path)
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"], start=txn.position)
        assert ids(await following(changes)) == [2]


async def test_with_a_lost_state_dir_a_start_of_another_history_is_a_reset(
    make: MakePostgres, sql: Sql
) -> None:
    """Its place may be far beyond the end of this log: nothing would ever come."""
    far = Position(History("1234567890", 1), Lsn.parse("FF/0"))
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"], start=far)
        assert str(far) in (await next_reset(changes)).reason
        asking = asyncio.create_task(following(changes))
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        assert ids(await asking) == [1]


async def test_with_a_lost_state_dir_a_start_beyond_the_end_is_a_reset(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        txn = await following(changes)
    shutil.rmtree(tmp_path)
    far = txn.position._replace(lsn=Lsn(txn.position.lsn + 2**40))
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"], start=far)
        assert "beyond the end" in (await next_reset(changes)).reason
        assert ids(await following(changes)) == [1]


async def test_with_a_lost_state_dir_and_slot_a_start_is_a_reset(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    """Only the position shows that there was something before."""
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1)
        txn = await following(changes)
        slot = pg.settings.slot_name
    await until(lambda: dropped(sql, slot))
    await insert(sql, 2)
    shutil.rmtree(tmp_path)
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"], start=txn.position)
        assert str(txn.position) in (await next_reset(changes)).reason
        asking = asyncio.create_task(following(changes))
        await insert(sql, 3)
        assert ids(await asking) == [3]


async def test_with_a_lost_state_dir_a_discarded_start_given_later_is_a_reset(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    async with make() as pg:
        changes = pg.changes("exact", tables=["orders"])
        await pg.wait_until_published("orders")
        await insert(sql, 1, 2)
        first = await following(changes)
    shutil.rmtree(tmp_path)
    async with make() as pg:
        other = Seen(pg.changes("other", tables=["orders"]))
        await other.until(1, 2)
        second = first.position._replace(lsn=Lsn(first.position.lsn + 1))
        await confirmed(sql, pg, second)
        changes = pg.changes("exact", tables=["orders"], start=first.position)
        assert str(first.position.lsn) in (await next_reset(changes)).reason


# -- two processes, one directory ----------------------------------------------------------------


async def test_a_waiting_process_learns_of_new_consumers(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    first = make()
    await first.open()
    await first.wait_until_active(LIMIT)
    async with make() as second:
        await second.monitor.wait_until(lambda status: status.health is Health.WAITING, LIMIT)
        late = first.changes("late", tables=["orders"])
        await first.wait_until_published("orders")
        await insert(sql, 1)
        assert ids(await following(late)) == [1]
        seen = Seen(second.changes("other", tables=["orders"]))
        await first.close()
        await seen.until(1)
        await insert(sql, 2)
        await seen.until(1, 2)
        back = Seen(second.changes("late", tables=["orders"]))
        await back.until(1, 2)


async def test_a_waiting_process_learns_of_a_reset(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    first = make()
    await first.open()
    theirs = Seen(first.changes("search", tables=["orders"]))
    await first.wait_until_published("orders")
    await insert(sql, 1)
    await theirs.until(1)
    async with make() as second:
        ours = Seen(second.changes("search", tables=["orders"]))
        await second.monitor.wait_until(lambda status: status.health is Health.WAITING, LIMIT)
        await first.sleep()
        await second.wait_until_active(LIMIT)
        await second.sleep()
        await until(lambda: dropped(sql, first.settings.slot_name))
        await first.wake()
        reason = await theirs.reset()
        await first.wait_until_active(LIMIT)
        await insert(sql, 2)
        await theirs.until(1, reason, 2)
        await first.close()
        await second.wake()
        assert await ours.reset() == reason
        await second.wait_until_active(LIMIT)
        await insert(sql, 3)
        await ours.until(reason, 3)


class Process:
    """A process's view of a directory, without a server."""

    def __init__(self, directory: Path) -> None:
        self.store = StateStore(directory / "state.db")
        self.hub = hub = Hub(self.store, Recorder())
        hub.on_tables = lambda: confirm_all(hub)

    async def stream(self, confirmed: int, *ends: int) -> None:
        """It has the lock, and so much comes."""
        await self.hub.reload()
        self.hub.on_tables()
        self.hub.begin(HISTORY, confirmed)
        for end in ends:
            self.hub.apply_all([Committed(1, Body(), {}, end - 5, end)])


HISTORY = History("1", 1)


def given(changes: Changes) -> list[object]:
    """What waits for a consumer: the ends of transactions, and reasons."""
    return [
        int(item.position.lsn) if isinstance(item, Transaction) else item.reason
        for item in changes._queue
        if not isinstance(item, SchemaChanged)
    ]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Process, Process]:
    first, second = Process(tmp_path), Process(tmp_path)
    return first, second


async def test_a_waiting_process_overwrites_nothing_when_it_closes(
    two: tuple[Process, Process],
) -> None:
    first, second = two
    changes = first.hub.attach("search")
    await first.stream(100, 110, 120)
    await first.hub.checkpoint(100)
    await second.hub.reload()
    await first.hub.reset("restored")
    await first.stream(50, 60)
    await first.hub.checkpoint(50)
    await second.hub.save()
    with pytest.raises(StreamEnded, match="another instance"):
        await second.hub.checkpoint(120)  # before it is told to the server, which it is not
    assert first.store.confirmed() == 50
    assert first.store.load().consumers["search"].acknowledged == 50
    assert given(changes) == ["restored", 60]


async def test_acknowledgements_of_another_process_are_respected(
    two: tuple[Process, Process],
) -> None:
    first, second = two
    await second.hub.reload()
    theirs, slow = first.hub.attach("search"), first.hub.attach("slow")
    await first.stream(100, 110, 120)
    for item in list(theirs._queue):
        assert isinstance(item, Transaction)
        await item.ack()
    await first.hub.checkpoint(100)
    ours, late = second.hub.attach("search"), second.hub.attach("slow")
    await second.stream(100, 110, 120, 130)
    assert (given(ours), given(late)) == ([130], [110, 120, 130])
    del slow


async def test_a_consumer_dropped_by_another_process_retains_nothing(
    two: tuple[Process, Process],
) -> None:
    first, second = two
    first.hub.attach("gone")
    here = first.hub.attach("here")
    await first.stream(100, 110)
    await first.hub.checkpoint(100)
    await second.hub.reload()
    changes = second.hub.attach("here")
    await first.hub.drop("gone")
    await first.hub.drop("here")
    await second.stream(105, 110)
    assert set(second.hub.consumers()) == {"here"}
    assert "was dropped by another instance" in str(given(changes)[0])
    assert second.hub.flushed() == 105
    del here


async def test_an_acknowledgement_from_before_a_reset_is_invalid(tmp_path: Path) -> None:
    """The place may be that of another transaction by now."""
    process = Process(tmp_path)
    changes = process.hub.attach("search")
    await process.stream(100, 110)
    held = changes._queue.popleft()
    assert isinstance(held, Transaction)
    await process.hub.reset("restored")
    await process.stream(105, 110)
    await held.ack()
    assert process.hub.flushed() == 105
    assert given(changes) == ["restored", 110]
    assert isinstance(changes._queue[0], Reset)


# -- a state file that others use ----------------------------------------------------------------


async def test_a_reader_of_the_state_file_interrupts_the_stream_only_for_a_while(
    make: MakePostgres, sql: Sql, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream_id: str
) -> None:
    monkeypatch.setattr(_store, "PATIENCE", 0.05)
    async with make() as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        reader = sqlite3.connect(tmp_path / f"{stream_id}.db", isolation_level=None)
        reader.execute("begin")
        reader.execute("select * from consumers").fetchall()
        events = pg.events()
        await insert(sql, 1)
        txn = await following(changes)
        await txn.ack()
        async with asyncio.timeout(LIMIT):
            while (event := await anext(events)).name != "connection_error":
                pass
        assert str(tmp_path) in event.detail
        assert "locked" in event.detail
        reader.close()
        await insert(sql, 2)
        last = await following(changes)
        while ids(last) != [2]:
            last = await following(changes)
        await last.ack()
        await confirmed(sql, pg, last.position)
        assert pg.health is Health.ACTIVE


async def test_a_process_killed_beside_a_slow_consumer_keeps_the_position_of_a_fast_one(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    tables = ["orders"]
    async with make() as pg:
        slow, fast = pg.changes("slow", tables=tables), pg.changes("fast", tables=tables)
        await pg.wait_until_published()
        await insert(sql, 1, 2, 3)
        assert ids(await following(slow)) == [1]
        for _ in range(3):
            txn = await following(fast)
            await txn.ack()
        path = tmp_path / f"{pg.settings.stream_id}.db"

        async def stored() -> bool:
            with closing(StateStore(path)) as store:
                return (store.load().consumers["fast"].acknowledged or 0) >= txn.position.lsn

        await until(stored)
        # The state file that a killed process would leave: at its end, this one stores everything.
        (killed := tmp_path / "killed").mkdir()
        with (
            closing(sqlite3.connect(path)) as file,
            closing(sqlite3.connect(killed / path.name)) as copy,
        ):
            file.backup(copy)
    await insert(sql, 4)
    async with make(state_dir=killed) as pg:
        slow, fast = pg.changes("slow", tables=tables), pg.changes("fast", tables=tables)
        assert [ids(await following(slow)) for _ in range(4)] == [[1], [2], [3], [4]]
        assert ids(await following(fast)) == [4]
