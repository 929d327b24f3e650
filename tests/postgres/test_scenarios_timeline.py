"""Another history of the server (restored, exchanged, promoted) is a `Reset`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from moored.kernel import WaitTimeout
from moored.postgres import History, Lsn, Position, Postgres
from moored.postgres.consume._store import StateStore

from .clusters import Seen, cluster, standby_of
from .server import (
    LIMIT,
    ConsumerProcess,
    connected,
    following,
    ids,
    next_reset,
    published,
    quicken,
    until,
)

RESTORED = (
    "the database is on timeline 2 instead of 1: it was restored to an earlier point, or a "
    "standby was promoted"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def kept(directory: Path, stream_id: str = "default") -> tuple[History | None, dict[str, object]]:
    """The history that is written down, and what waits for each consumer."""
    store = StateStore(directory / f"{stream_id}.db")
    try:
        return store.history(), {
            name: it.reset and it.reset.reason for name, it in store.load().consumers.items()
        }
    finally:
        store.close()


# -- restored to an earlier point ----------------------------------------------------------------


async def test_a_restore_while_streaming_is_a_reset(tmp_path: Path) -> None:
    """Three consumers: one is there, one is away, one works on a transaction meanwhile."""
    async with cluster(archive_mode="on") as db:
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            working = pg.changes("working", tables=["orders"])
            away = pg.changes("away", tables=["orders"])
            seen = Seen(pg.changes("there", tables=["orders"]))
            await pg.wait_until_published("orders")
            backup = await db.back_up()
            await db.insert(1, 2)
            await db.restore_point("before")
            await db.insert(3, 4)
            await seen.until(1, 2, 3, 4)
            for number in (1, 2, 3, 4):
                txn = await following(away)
                assert ids(txn) == [number]
                await txn.ack()
            await away.aclose()
            held = await following(working)
            system_id = held.position.history.system_id
            assert held.position.history == History(system_id, 1)

            await db.restore(backup, "before")
            await seen.until(1, 2, 3, 4, RESTORED)
            await pg.wait_until_active(LIMIT)
            resets = {"there": None, "away": RESTORED, "working": RESTORED}

            async def stored() -> bool:
                return kept(tmp_path) == (History(system_id, 2), resets)

            await until(stored)  # a thread writes that the reset was handled
            await db.insert(5)
            await seen.until(1, 2, 3, 4, RESTORED, 5)

            # It is still of the time that it is of, and to acknowledge it changes nothing.
            assert held.position.history == History(system_id, 1)
            await held.ack()
            assert (await next_reset(working)).reason == RESTORED
            assert ids(await following(working)) == [5]
            back = Seen(pg.changes("away", tables=["orders"]))
            await back.until(RESTORED, 5)
            told = [event.name for event in pg.last_events if event.detail == RESTORED]
            assert told == ["warning"]  # once, however many tries it took
            names = [event.name for event in pg.last_events]
            assert names.index("warning") < len(names) - 1 - names[::-1].index("ready")
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            await db.insert(6)
            assert ids(await following(pg.changes("there", tables=["orders"]))) == [6]


@pytest.mark.soak  # as a restore while streaming, at other moments
async def test_a_restore_between_runs_is_a_reset(tmp_path: Path) -> None:
    """A position of the old history, kept by a user, is recognised whenever it comes."""
    async with cluster(archive_mode="on") as db:
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            exact = pg.changes("exact", tables=["orders"])
            await pg.wait_until_published("orders")
            backup = await db.back_up()
            await db.restore_point("before")
            await db.insert(1, 2)
            positions = []
            for _ in range(2):
                txn = await following(exact)
                positions.append(txn.position)
                await txn.ack()
            plain = pg.changes("plain", tables=["orders"])
        await db.restore(backup, "before")
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            exact = pg.changes("exact", tables=["orders"], start=positions[1])
            assert (await next_reset(exact)).reason == RESTORED
            asking = asyncio.create_task(following(exact))
            await pg.wait_until_active(LIMIT)
            await db.insert(3)
            txn = await asking
            assert ids(txn) == [3]
            new = txn.position
            await txn.ack()
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            plain = pg.changes("plain", tables=["orders"])
            exact = pg.changes("exact", tables=["orders"], start=str(positions[1]))
            assert str(positions[1]) in (await next_reset(exact)).reason
            await exact.aclose()
            assert (await next_reset(plain)).reason == RESTORED
            assert ids(await following(plain)) == [3]
            await db.insert(4)
            assert ids(await following(plain)) == [4]
            exact = pg.changes("exact", tables=["orders"], start=new)
            await next_reset(exact)  # the one that it has not understood
            assert ids(await following(exact)) == [4]


@pytest.mark.soak  # as a restore while streaming, at other moments
async def test_a_process_killed_during_a_reset_resets_again(tmp_path: Path) -> None:
    """The next process resets again, until the consumer has handled the reset."""
    async with cluster(archive_mode="on") as db:
        consumer = ConsumerProcess(db.url, "ids", tmp_path)
        state, told = tmp_path / "ids.state", f"reset {RESTORED}"
        with consumer:
            await published(db.url, "ids")
            backup = await db.back_up()
            await db.insert(1)
            await db.restore_point("before")
            await db.insert(2)
            await until(lambda: has(consumer, "1", "2"))
        await db.restore(backup, "before")
        for place in (
            ("before", "check"),
            ("within", "store.reset"),
            ("after", "store.reset"),
            ("before", "set_history"),
        ):
            status = await consumer.run_to_its_end(dies=place)
            assert status == -signal.SIGKILL, consumer.log.read_text()
            history, _ = kept(state, "ids")
            assert history is not None
            assert history.timeline_id == 1, place
            if place == ("before", "check"):
                await db.insert(3)  # the slot is there, and it is in it
        assert await consumer.run_to_its_end(dies=("before", "begin")) == -signal.SIGKILL
        history, waiting = kept(state, "ids")
        assert history is not None
        assert history.timeline_id == 2
        # It has not understood it, unless it was quicker than its end.
        assert waiting == {"ids": RESTORED} or consumer.lines()[-1] == told
        with consumer:
            await until(lambda: ends_with(consumer, "3"))
        await db.insert(4)
        with consumer:
            await until(lambda: ends_with(consumer, "4"))
        # One that was not acknowledged, or not understood, comes again.
        assert list(dict.fromkeys(consumer.lines())) == ["1", "2", told, "3", "4"]


async def has(consumer: ConsumerProcess, *lines: str) -> bool:
    assert not consumer.ended, consumer.log.read_text()
    return consumer.lines() == list(lines)


async def ends_with(consumer: ConsumerProcess, line: str) -> bool:
    assert not consumer.ended, consumer.log.read_text()
    return bool(consumer.lines()) and consumer.lines()[-1] == line


@pytest.mark.soak  # as the next one, with less WAL
async def test_a_restored_copy_of_the_disk_is_a_reset(tmp_path: Path) -> None:
    """The timeline is the same, and the slot is there: only the log is too short."""
    async with cluster() as db, Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
        seen = Seen(pg.changes(tables=["orders"]))
        await pg.wait_until_published("orders")
        await db.insert(1)
        await seen.until(1)
        await db.server.stop()
        copy = db.copy_data()
        await db.server.start()
        await db.switch_log(3)
        await db.insert(2)
        await seen.until(1, 2)
        await pg.sleep()
        await db.server.stop()
        db.replace_data(copy)
        await db.server.start()
        await pg.wait_until_active(LIMIT)
        reason = await seen.reset()
        assert "a copy of its disk was restored" in reason
        await db.insert(3)
        await seen.until(1, 2, reason, 3)


async def test_a_restored_copy_with_as_much_wal_as_before_is_a_reset(
    tmp_path: Path,
) -> None:
    """The log is as long as it was: only the commits in it are others."""
    async with cluster() as db, Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
        seen = Seen(pg.changes(tables=["orders"]))
        await pg.wait_until_published("orders")
        await db.insert(1)
        await seen.until(1)
        await pg.sleep()
        await db.server.stop()
        copy = db.copy_data()
        await db.server.start()
        await db.insert(2)
        await pg.wake()
        await seen.until(1, 2)
        await pg.sleep()
        before = await db.ask("select pg_current_wal_lsn()")
        await db.server.stop()
        db.replace_data(copy)
        await db.server.start()
        await db.insert(3)
        await db.switch_log(3)
        assert await db.ask("select pg_current_wal_lsn() > %s::pg_lsn", before)
        await pg.wake()
        reason = await seen.reset()
        assert "a copy of its disk was restored" in reason
        await pg.wait_until_active(LIMIT)
        await db.insert(4)
        await seen.until(1, 2, reason, 3, 4)


# -- another database ----------------------------------------------------------------------------


async def test_another_database_behind_the_same_url_is_a_reset(tmp_path: Path) -> None:
    async with cluster() as db, Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
        seen = Seen(pg.changes(tables=["orders"]))
        away = pg.changes("away", tables=["orders"])
        await pg.wait_until_published("orders")
        await db.switch_log(5)  # places in the new one's log come before those of the old one's
        await db.insert(1)
        await seen.until(1)
        txn = await following(away)
        old = txn.position
        await away.aclose()
        await db.server.stop()
        db.remove_data()
        await db.server.start()
        await db.make_table()
        reason = await seen.reset()
        assert "another database" in reason
        assert old.history.system_id in reason
        await pg.wait_until_active(LIMIT)
        await published(db.url, "default")
        await db.insert(2)
        await seen.until(1, reason, 2)
        assert await db.ask("select pg_current_wal_lsn() < %s::pg_lsn", str(old.lsn))
        back = Seen(pg.changes("away", tables=["orders"], start=old))
        reason = await back.reset()
        assert str(old) in reason
        await db.insert(3)
        await back.until(reason, 3)


# -- a promoted standby --------------------------------------------------------------------------


async def test_a_standby_is_named_as_such_and_tried_again(tmp_path: Path) -> None:
    async with (
        cluster() as db,
        standby_of(db) as standby,
        Postgres(standby.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        await until(lambda: refused(pg))
        with pytest.raises(WaitTimeout, match=r"a standby: .* set replication_url to the primary"):
            await pg.wait_until_active(0.1)
        await standby.promote()
        await pg.wait_until_active(LIMIT)


@pytest.mark.soak  # as the next one, without its slot
async def test_a_promoted_standby_without_the_slot_is_a_reset(tmp_path: Path) -> None:
    """The standby takes over the address, first as it is and then promoted."""
    async with cluster() as db, Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
        seen = Seen(pg.changes(tables=["orders"]))
        await pg.wait_until_published("orders")
        async with standby_of(db) as standby:
            await db.insert(1, 2)
            await seen.until(1, 2)
            await standby.caught_up_with(db)
            await db.server.kill()
            await standby.move_to(db.server.port)
            await until(lambda: refused(pg))
            assert seen.items == [1, 2]  # while it is a standby, nobody is told anything
            await standby.promote()
            await pg.wait_until_active(LIMIT)
            await standby.insert(3)
            await seen.until(1, 2, RESTORED, 3)


async def refused(pg: Postgres) -> bool:
    return any("the server is a standby" in event.detail for event in pg.last_events)


async def test_a_promoted_standby_with_a_synced_slot_continues_after_a_reset(
    tmp_path: Path,
) -> None:
    """What nobody had acknowledged is in the copy, and comes after the reset.

    The manager is connected before the promotion, and waits for the lock meanwhile.
    """
    async with cluster(synchronized_standby_slots="standby") as db:
        await db.sql("select pg_create_physical_replication_slot('standby', true)")
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            changes = pg.changes(tables=["orders"])
            await pg.wait_until_published("orders")
            slot = pg.settings.slot_name
            of_slot = "from pg_replication_slots where slot_name = %s"
            assert await db.ask(f"select failover {of_slot}", slot)
            async with standby_of(db, slot="standby") as standby:
                await until(lambda: standby.ask(f"select synced and not temporary {of_slot}", slot))
                # Without the standby the stream has waited, and that was all.
                assert "connection_error" not in [event.name for event in pg.last_events]
                await db.insert(1, 2)
                first = await following(changes)
                await first.ack()
                second = await following(changes)
                assert (ids(first), ids(second)) == ([1], [2])
                await standby.caught_up_with(db)
                await db.server.kill()
                await standby.move_to(db.server.port)
                async with connected(standby.url) as other:
                    await other.execute("select pg_advisory_lock(hashtext(%s))", (slot,))
                    await until(lambda: waits(pg))
                    await standby.promote()
                assert (await next_reset(changes)).reason == RESTORED
                again = await following(changes)
                if ids(again) == [1]:  # the copy may not know of the last acknowledgement
                    again = await following(changes)
                assert ids(again) == [2]
                await standby.insert(3)
                assert ids(await following(changes)) == [3]


async def waits(pg: Postgres) -> bool:
    return pg.machine.at("start_replication_client:acquiring_lock")


# -- the ends of the log -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segment", "crosses"),
    [
        ("000000017FFFFFFF000000FE", Lsn.parse("80000000/0")),
        pytest.param("00000001FFFFFFFF000000F0", None, marks=pytest.mark.soak),
    ],
    ids=["where a sign would change", "at the end"],
)
async def test_streaming_at_extreme_lsns(tmp_path: Path, segment: str, crosses: Lsn | None) -> None:
    async with cluster() as db:
        await db.server.stop()
        await db.move_log(segment)
        await db.server.start()
        positions: list[Position] = []
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            changes = pg.changes(tables=["orders"])
            await pg.wait_until_published("orders")
            for number in range(4):
                await db.insert(number)
                txn = await following(changes)
                assert ids(txn) == [number]
                positions.append(txn.position)
                await txn.ack()
                if number == 1:
                    await db.switch_log(2)
            query = "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots"
            await until(lambda: db.ask(query, str(positions[-1].lsn)))
        assert positions == sorted(positions)
        assert positions[0].lsn > 2**62
        assert crosses is None or positions[1].lsn < crosses < positions[2].lsn
        await db.insert(4, 5)
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            start = Position.parse(str(positions[-1]))
            changes = pg.changes(tables=["orders"], start=start)
            assert ids(await following(changes)) == [4]
            assert ids(await following(changes)) == [5]
        async with Postgres(db.url, state_dir=tmp_path, pool_size=2) as pg:
            changes = pg.changes(tables=["orders"])
            assert ids(await following(changes)) == [4]
