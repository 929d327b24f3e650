"""A stream has one owner: hand-over, and which locks are broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moored.postgres import Postgres, StackEvent
from moored.postgres.report._health import Health
from moored.testing import scaled

from .conftest import MakePostgres, Sql
from .server import (
    LIMIT,
    ConsumerProcess,
    connected,
    following,
    ids,
    one,
    published,
    quicken,
    until,
    walsender,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, check_every=0.2, quiet=1.0)


async def at_step(pg: Postgres, step: str) -> None:
    async def there() -> bool:
        return pg.machine.at(step)

    await until(there)


async def waits(pg: Postgres) -> None:
    """Wait until the status says that another instance is active."""
    await pg.monitor.wait_until(lambda status: status.health is Health.WAITING, LIMIT)


WAITING = "start_replication_client:acquiring_lock"


# -- hand-over -----------------------------------------------------------------------------------


async def test_the_second_waits_and_takes_over_when_the_first_closes(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """As in a rolling deploy: another machine, so another state directory."""
    first = make(state_dir=tmp_path / "first")
    await first.open()
    theirs = first.changes(tables=["orders"])
    await published(streamed_url, stream_id)
    async with make(state_dir=tmp_path / "second") as second:
        ours = second.changes(tables=["orders"])
        await waits(second)
        for number in (1, 2):
            await sql.execute("insert into orders values (%s, 'x')", (number,))
        done, undone = await following(theirs), await following(theirs)
        await done.ack()
        assert (ids(done), ids(undone)) == ([1], [2])
        await sql.execute("insert into orders values (3, 'x')")
        await first.close()
        assert ids(await following(ours)) == [2]
        assert ids(await following(ours)) == [3]
        await second.wait_until_active(LIMIT)


async def test_an_instance_that_loses_the_lock_in_a_rewind_leaves_the_publication_alone(
    make: MakePostgres, sql: Sql
) -> None:
    queued = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    async with make(application_name="first") as first:
        await first.wait_until_active(LIMIT)
        async with make(application_name="second") as second:
            await until(lambda: one(sql, queued))
            first._restarter.manager._rewind_now()
            await second.wait_until_active(LIMIT)
            parts = first._restarter.manager._parts
            assert not parts.is_running("publish")
            assert not parts.is_running("watch")

        async def publishes() -> bool:
            return parts.is_running("publish")

        await until(publishes)


async def test_the_second_takes_over_when_the_first_is_killed(
    sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = ConsumerProcess(streamed_url, "ids", tmp_path / "a", stream_id=stream_id)
    second = ConsumerProcess(streamed_url, "ids", tmp_path / "b", stream_id=stream_id)
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    with first, second:
        await published(streamed_url, stream_id)
        await until(lambda: one(sql, waiting))
        written = 0
        for kill in (None, first, None):
            if kill is not None:
                kill.kill()
            for _ in range(20):
                written += 1
                await sql.execute("insert into orders values (%s, 'x')", (written,))
        await until(lambda: ended_with(first, second, written))
        # Whoever was first has the beginning; nothing lies between what it has and the rest.
        one_has, other_has = map(numbers, (first, second))
        assert set(one_has) | set(other_has) == set(range(1, written + 1))
        assert one_has == sorted(one_has)
        assert other_has == sorted(other_has)


def numbers(consumer: ConsumerProcess) -> list[int]:
    return [int(line) for line in consumer.lines()]


async def ended_with(first: ConsumerProcess, second: ConsumerProcess, last: int) -> bool:
    if first.ended and second.ended:
        raise AssertionError(second.log.read_text())
    return last in numbers(first) + numbers(second)


async def test_a_hand_over_and_back_is_no_reset(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    """Two processes on one machine share their state."""
    for number in range(1, 1 + scaled(3, least=2)):
        async with make() as pg:
            changes = pg.changes(tables=["orders"])
            await published(streamed_url, stream_id)
            await pg.wait_until_active(LIMIT)
            async with make() as waiting:
                theirs = waiting.changes(tables=["orders"])
                await at_step(waiting, WAITING)
                await sql.execute("insert into orders values (%s, 'x')", (number,))
                txn = await following(changes)
                assert ids(txn) == [number]
                await txn.ack()
                await confirmed(sql, pg, str(txn.position.lsn))
                await pg.close()
                await waiting.wait_until_active(LIMIT)
                await sql.execute("insert into orders values (%s, 'y')", (number + 10,))
                txn = await following(theirs)
                assert ids(txn) == [number + 10]
                await txn.ack()


async def confirmed(sql: Sql, pg: Postgres, lsn: str) -> None:
    """Wait until everything up to here was confirmed to the server."""
    query = (
        "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    )
    await until(lambda: one(sql, query, lsn, pg.settings.slot_name))


# -- stuck ---------------------------------------------------------------------------------------


@asynccontextmanager
async def locked(url: str, slot: str) -> AsyncIterator[Sql]:
    """Hold the lock of a slot without using it."""
    async with connected(url, application_name="stuck") as conn:
        await conn.execute("select pg_advisory_lock(hashtext(%s))", (slot,))
        yield conn


async def test_a_stuck_lock_is_broken(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        slot = pg.settings.slot_name
    async with locked(streamed_url, slot) as stuck, make() as pg:
        pid = stuck.info.backend_pid
        await at_step(pg, WAITING)
        await pg.wait_until_active(LIMIT)
        query = "select count(*) from pg_stat_activity where pid = %s"
        assert await one(sql, query, pid) == 0


async def test_a_lock_whose_holder_is_busy_is_not_broken(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """It may be a manager during its setup, which runs a query every few seconds."""
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
        slot = pg.settings.slot_name
    async with locked(streamed_url, slot) as healthy, make() as pg:
        await at_step(pg, WAITING)
        for _ in range(8):  # longer than a quiet one would have lived
            await asyncio.sleep(0.2)
            assert await one(healthy, "select 1") == 1
        assert pg.machine.at(WAITING)
        said = pg.monitor.conditions()["pg_lock_acquired"].detail
        assert str(healthy.info.backend_pid) in str(said)
        assert "stuck" in str(said)


async def test_a_lock_whose_holder_streams_is_not_broken(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async with make() as owner:
        await owner.wait_until_active(LIMIT)
        await until(lambda: walsender(sql, owner))
        pid = await walsender(sql, owner)
        async with make(state_dir=tmp_path / "other") as pg:
            await at_step(pg, WAITING)
            await waits(pg)
            await asyncio.sleep(2.5)  # several checks, and longer than a quiet one would have lived
            assert await walsender(sql, owner) == pid
            assert pg.health is Health.WAITING


async def test_a_lock_whose_holder_creates_its_slot_is_not_broken(
    make: MakePostgres, sql: Sql, streamed_url: str, tmp_path: Path
) -> None:
    async with connected(streamed_url) as blocker:
        await blocker.execute("begin")
        await blocker.execute("insert into orders values (1, 'x')")
        async with make() as owner:
            await at_step(owner, "start_replication_client:configuring_connection")
            async with make(state_dir=tmp_path / "other") as pg:
                await at_step(pg, WAITING)
                assert owner._restarter.manager.client is not None
                pid = owner._restarter.manager.client.setup.findings.backend_pid
                await asyncio.sleep(1.5)
                query = "select count(*) from pg_stat_activity where pid = %s"
                assert await one(sql, query, pid) == 1
                await blocker.execute("commit")
                await owner.wait_until_active(LIMIT)


# -- who blocks ----------------------------------------------------------------------------------


async def test_a_pending_transaction_delays_the_start_and_is_named(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with connected(streamed_url) as blocker, make() as pg:
        await blocker.execute("begin")
        await blocker.execute("insert into orders values (1, 'pending')")
        told = await asyncio.wait_for(blocked(pg), LIMIT)
        assert f"pid {blocker.info.backend_pid}" in told.detail
        assert "insert" not in told.detail
        (named,) = pg.statistics()["slot_blockers"]
        assert named["query"] == ""
        assert pg.health is Health.STARTING
        await blocker.execute("commit")
        await pg.wait_until_active(LIMIT)


async def test_the_sql_of_a_pending_transaction_is_shown_on_request_without_literals(
    make: MakePostgres, sql: Sql, streamed_url: str
) -> None:
    async with connected(streamed_url) as blocker, make(show_queries=True) as pg:
        await blocker.execute("begin")
        await blocker.execute("insert into orders values (1, 'pending')")
        await asyncio.wait_for(blocked(pg), LIMIT)
        assert "insert into orders values (…, …)" in pg.explain()
        await blocker.execute("commit")


async def blocked(pg: Postgres) -> StackEvent:
    async for event in pg.events():
        if event.name == "replication_slot_creation_blocked_by_pending_transactions":
            return event
    raise AssertionError("the events ended")


async def test_an_active_slot_is_retried(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    """An old connection of ours that the server has not given up yet: 55006, and a retry."""
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        slot, publication = pg.settings.slot_name, pg.settings.publication_name
    async with connected(streamed_url, replication="database") as old:
        await old.execute(
            f"START_REPLICATION SLOT \"{slot}\" LOGICAL 0/0 (proto_version '1', "
            f"publication_names '{publication}')".encode()
        )
        async with make() as pg:
            changes = pg.changes(tables=["orders"])
            event = await asyncio.wait_for(failure(pg), LIMIT)
            assert str(old.info.backend_pid) in event.detail
            assert "another connection reads from the replication slot" in event.detail
            old.pgconn.finish()
            await sql.execute("insert into orders values (1, 'x')")
            assert ids(await following(changes)) == [1]


async def failure(pg: Postgres) -> StackEvent:
    async for event in pg.events():
        if event.name == "connection_error":
            return event
    raise AssertionError("the events ended")
