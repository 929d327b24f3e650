"""Processes, servers and connections fail while streaming, and the stream recovers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from moored.postgres import Postgres
from moored.postgres.consume._publisher import Publisher
from moored.postgres.report._health import Health
from moored.postgres.server import _admin
from moored.postgres.stream import _replication
from moored.postgres.stream._link import ReplicationLink
from moored.testing import FaultProxy

from .conftest import MakePostgres, Sql
from .server import (
    LIMIT,
    ConsumerProcess,
    connected,
    following,
    ids,
    one,
    own_server,
    published,
    quicken,
    through,
    until,
    walsender,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


async def insert(url: str, *numbers: int) -> None:
    """One transaction for each number."""
    async with connected(url) as conn:
        for number in numbers:
            await conn.execute("insert into orders values (%s, 'x')", (number,))


# -- the manager's process -----------------------------------------------------------------------


async def test_unacknowledged_transactions_of_a_killed_process_are_delivered_again(
    streamed_url: str, stream_id: str, sql: Sql, tmp_path: Path
) -> None:
    consumer = ConsumerProcess(streamed_url, "ids", tmp_path, stream_id=stream_id, acks=False)
    with consumer:
        await published(streamed_url, stream_id)
        await insert(streamed_url, 1, 2)
        await until(lambda: has(consumer, ["1", "2"]))
    await insert(streamed_url, 3)
    with consumer:
        await until(lambda: has(consumer, ["1", "2", "1", "2", "3"]))


async def has(consumer: ConsumerProcess, lines: list[str]) -> bool:
    assert not consumer.ended
    return consumer.lines() == lines


async def test_acknowledged_transactions_of_a_killed_process_are_not_delivered_again(
    streamed_url: str, stream_id: str, sql: Sql, tmp_path: Path
) -> None:
    consumer = ConsumerProcess(streamed_url, "ids", tmp_path, stream_id=stream_id)
    query = (
        "select confirmed_flush_lsn >= %s from pg_replication_slots "
        f"where slot_name = 'moored_slot_{stream_id}'"
    )
    with consumer:
        await published(streamed_url, stream_id)
        await insert(streamed_url, 1)
        at = await one(sql, "select pg_current_wal_lsn()")
        await until(lambda: one(sql, query, at))
    await insert(streamed_url, 2)
    with consumer:
        await until(lambda: has(consumer, ["1", "2"]))


async def test_a_frozen_process_loses_nothing(tmp_path: Path) -> None:
    async with own_server(wal_sender_timeout="1s") as server:
        first = ConsumerProcess(server.url, "ids", tmp_path)
        with first:
            await published(server.url, "ids")
            await insert(server.url, 1)
            await until(lambda: has(first, ["1"]))
            os.kill(first.pid, signal.SIGSTOP)
            await insert(server.url, 2)
            try:
                # The server gives it up, and with its connection the lock.
                async with connected(server.url) as conn:
                    slot_is_free = "select not active from pg_replication_slots"
                    await until(lambda: one(conn, slot_is_free))
            finally:
                os.kill(first.pid, signal.SIGCONT)
            await until(lambda: has(first, ["1", "2"]))


# -- the server ----------------------------------------------------------------------------------


async def test_the_stream_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    async with (
        own_server() as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await published(server.url, "default")
        await server.restart()
        await insert(server.url, 1)
        assert ids(await following(changes)) == [1]
        await pg.wait_until_active(LIMIT)
        async with pg.connection() as conn:
            await conn.execute("insert into orders values (2, 'x')")
        assert ids(await following(changes)) == [2]


async def test_the_status_reports_an_outage(tmp_path: Path) -> None:
    async with (
        own_server() as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await published(server.url, "default")
        await pg.wait_until_active(LIMIT)
        await server.kill()
        await asyncio.wait_for(
            pg.monitor.wait_until(lambda status: status.health is not Health.ACTIVE), LIMIT
        )
        await asyncio.sleep(0.3)  # some tries, each of them in vain
        assert pg.health in (Health.STARTING, Health.WAITING)
        asking = asyncio.create_task(following(changes))
        await server.start()
        await pg.wait_until_active(LIMIT)
        await insert(server.url, 1)
        assert ids(await asking) == [1]


async def test_a_connection_requested_during_an_outage_is_given_after_it(
    tmp_path: Path,
) -> None:
    async with (
        own_server() as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        await pg.wait_until_active(LIMIT)
        await server.kill()
        await asyncio.wait_for(
            pg.monitor.wait_until(lambda status: status.health is not Health.ACTIVE), LIMIT
        )

        async def ask() -> int:
            async with pg.connection(timeout=LIMIT) as conn:
                return int(await one(conn, "select 7"))

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.2)
        await server.start()
        assert await asyncio.wait_for(asking, LIMIT) == 7


async def test_a_slow_consumer_does_not_delay_the_shutdown_of_the_server(tmp_path: Path) -> None:
    """It waits until all that it sent is safe, and that may take a consumer any time."""
    async with (
        own_server() as server,
        Postgres(server.url, state_dir=tmp_path, pool_size=2) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await insert(server.url, 1)
        slow = await following(changes)
        await asyncio.wait_for(server.restart(), LIMIT)
        await pg.wait_until_active(LIMIT)
        await slow.ack()
        await insert(server.url, 2)
        assert ids(await following(changes)) == [2]


# -- the connection ------------------------------------------------------------------------------


async def test_a_silent_drop_is_noticed(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    known = psycopg.conninfo.conninfo_to_dict(streamed_url)
    async with FaultProxy("127.0.0.1", int(str(known["port"]))) as proxy:
        url = through(streamed_url, proxy.port)
        async with make(replication_url=url) as pg:
            changes = pg.changes(tables=["orders"])
            await published(streamed_url, stream_id)
            await pg.wait_until_active(LIMIT)
            before = await walsender(sql, pg)
            proxy.black_hole()
            began = time.monotonic()
            await asyncio.wait_for(
                pg.monitor.wait_until(lambda status: status.health is not Health.ACTIVE), LIMIT
            )
            assert time.monotonic() - began > 1  # it was silence that was noticed
            proxy.resume()
            await sql.execute("insert into orders values (1, 'x')")
            assert ids(await following(changes)) == [1]
            assert await walsender(sql, pg) != before


async def test_publishing_on_a_silent_server_can_be_cancelled_at_once(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that begins again cancels it, and waits for its end before the next connect."""
    known = psycopg.conninfo.conninfo_to_dict(streamed_url)
    look, looking = Publisher.publish, asyncio.Queue[psycopg.AsyncConnection[Any]]()
    async with (
        FaultProxy("127.0.0.1", int(str(known["port"]))) as proxy,
        make(replication_url=through(streamed_url, proxy.port)) as pg,
    ):
        one = pg.changes("one", tables=["orders"])
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)

        async def falls_silent(
            publisher: Publisher, conn: psycopg.AsyncConnection[Any]
        ) -> list[str]:
            proxy.black_hole()
            looking.put_nowait(conn)
            return await look(publisher, conn)

        monkeypatch.setattr(Publisher, "publish", falls_silent)
        other = pg.changes("other", tables=["orders"])
        conn = await asyncio.wait_for(looking.get(), LIMIT)
        await until(lambda: waits_for_an_answer(conn))
        # The driver alone waits for 5 s, twice; a child that takes as long is abandoned.
        await pg._restarter.manager._parts.stop("publish")
        assert pg._restarter.manager._parts._supervisor.abandoned == 0
        proxy.resume()
        await asyncio.gather(one.aclose(), other.aclose())


async def waits_for_an_answer(conn: psycopg.AsyncConnection[Any]) -> bool:
    return conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("IDENTIFY_SYSTEM", marks=pytest.mark.soak),
        pytest.param("SELECT pg_advisory_lock", marks=pytest.mark.soak),
        pytest.param("CREATE_REPLICATION_SLOT", marks=pytest.mark.soak),
        pytest.param("SET TimeZone", marks=pytest.mark.soak),
        "START_REPLICATION",
    ],
)
async def test_a_server_that_vanishes_during_the_setup_is_noticed(
    command: str,
    make: MakePostgres,
    sql: Sql,
    streamed_url: str,
    stream_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it waits for then: also for a lock or a slot, which may take any time."""
    quicken(monkeypatch, check_every=1.0)
    monkeypatch.setattr(_replication, "PROMPT", 1.0)
    monkeypatch.setattr(_admin, "TIMEOUT", 1.0)
    known = psycopg.conninfo.conninfo_to_dict(streamed_url)
    execute, fell = ReplicationLink._execute, asyncio.Event()
    async with FaultProxy("127.0.0.1", int(str(known["port"]))) as proxy:

        async def falls_silent(link: ReplicationLink, text: str) -> Any:
            if text.startswith(command) and not fell.is_set():
                proxy.black_hole()
                fell.set()
            return await execute(link, text)

        monkeypatch.setattr(ReplicationLink, "_execute", falls_silent)
        async with make(replication_url=through(streamed_url, proxy.port)) as pg:
            changes = pg.changes(tables=["orders"])
            await asyncio.wait_for(fell.wait(), LIMIT)
            await until(lambda: told(pg, "connection_error"))
            proxy.resume()
            await published(streamed_url, stream_id)
            await sql.execute("insert into orders values (1, 'x')")
            assert ids(await following(changes)) == [1]


async def told(pg: Postgres, name: str) -> bool:
    return any(event.name == name for event in pg.last_events)


async def test_an_idle_connection_is_kept(
    make: MakePostgres, sql: Sql, stream_id: str, streamed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the event loop was blocked for longer than the allowed silence."""
    monkeypatch.setattr("moored.postgres.stream._replication.SILENCE", 1.0)
    async with make() as pg:
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        await pg.wait_until_active(LIMIT)
        await sql.execute("insert into orders values (0, 'x')")
        assert ids(await following(changes)) == [0]
        before = await walsender(sql, pg)
        assert before is not None
        for _ in range(3):
            await asyncio.sleep(0.3)
            time.sleep(2.0)  # noqa: ASYNC251 - a consumer that computes for a while
        await sql.execute("insert into orders values (1, 'x')")
        assert ids(await following(changes)) == [1]
        assert await walsender(sql, pg) == before


async def test_connections_cut_at_any_byte_lose_nothing(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str
) -> None:
    known = psycopg.conninfo.conninfo_to_dict(streamed_url)
    async with (
        FaultProxy("127.0.0.1", int(str(known["port"]))) as proxy,
        make(replication_url=through(streamed_url, proxy.port)) as pg,
    ):
        changes = pg.changes(tables=["orders"])
        await published(streamed_url, stream_id)
        for number in range(1, 9):
            proxy.cut_after(number * 700, "down")
            await sql.execute("insert into orders values (%s, repeat('x', 400))", (number,))
            await asyncio.sleep(0.15)
        proxy.heal()
        seen = [ids(await following(changes))[0] for _ in range(8)]
        assert seen == list(range(1, 9))
