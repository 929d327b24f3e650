"""An instance that waits for the lock of its stream: what works there, and what it reports."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.servers import free_port, require_server

from moored.postgres import Postgres
from moored.postgres.outbox._looks import Look
from moored.postgres.stream import _replication

from .conftest import MakePostgres, Sql
from .server import LIMIT, one, stands_by, through, until

#: Seconds after which a pooler without an answer is left, and another route is taken.
GIVEN_UP = 10.0 + 5.0

HELD = "select count(*) from pg_locks where locktype = 'advisory' and not granted"


async def test_a_standby_hands_out_connections_and_keeps_them_when_it_takes_over(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    first = make(state_dir=tmp_path / "first")
    await first.open()
    await first.wait_until_active(LIMIT)
    async with make(state_dir=tmp_path / "second") as second, second.connection(LIMIT) as held:
        await until(lambda: one(sql, HELD))  # it still waits for the lock
        assert await one(held, "select 1") == 1
        await first.close()
        await second.wait_until_active(LIMIT)
        assert await one(held, "select 2") == 2


async def test_a_standby_that_ends_leaves_no_request_for_the_lock(
    make: MakePostgres, sql: Sql, tmp_path: Path
) -> None:
    """The server would keep it, and its WAL sender, until the holder releases the lock."""

    async def nothing_is_left() -> bool:
        return bool(await one(sql, HELD) == 0)

    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        async with make(state_dir=tmp_path / "second") as second:
            await stands_by(second)
            await second.sleep()
            await until(nothing_is_left)
            await second.wake()
            await stands_by(second)
        await until(nothing_is_left)


KILLED = """
import asyncio, os, signal, sys
from moored.postgres import ConnectionState, Postgres

async def main():
    async with Postgres(sys.argv[1], stream_id=sys.argv[2], state_dir=sys.argv[3]) as pg:
        await pg.monitor.wait_until(lambda now: now.conn is ConnectionState.WAITING_ON_LOCK)
        while not pg.standby_of:
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_standby_that_is_killed_leaves_no_request_for_the_lock(
    make: MakePostgres, sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path
) -> None:
    async def nothing_is_left() -> bool:
        return bool(await one(sql, HELD) == 0)

    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        arguments = (KILLED, streamed_url, stream_id, str(tmp_path / "second"))
        second = await asyncio.create_subprocess_exec(sys.executable, "-c", *arguments)
        assert await second.wait() == -signal.SIGKILL
        assert await one(sql, HELD)
        await until(nothing_is_left)


async def test_a_standby_opens_no_pool_for_administration(
    make: MakePostgres, tmp_path: Path
) -> None:
    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        async with make(state_dir=tmp_path / "second", pool_size=3) as second:
            await stands_by(second)
            pools = second.statistics()["pools"]
            assert {name: each["connected"] for name, each in pools.items()} == {"snapshot": 2}


async def test_a_standby_does_not_hold_back_vacuum_for_long(
    make: MakePostgres, sql: Sql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that waits for the lock has a snapshot, so it is sent again now and then."""
    monkeypatch.setattr(_replication, "RENEW", 0.2)
    oldest = "select backend_xmin::text::bigint from pg_stat_activity where wait_event = 'advisory'"
    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        async with make(state_dir=tmp_path / "second") as second:
            await stands_by(second)
            seen = set[int]()

            async def advances() -> bool:
                await sql.execute("insert into orders select coalesce(max(id), 0) + 1 from orders")
                if found := await one(sql, oldest):  # there is none between two requests
                    seen.add(found)
                return len(seen) > 1

            await until(advances)
            await first.close()
            await second.wait_until_active(LIMIT)


async def test_a_standby_reads_the_outbox(make: MakePostgres, sql: Sql, tmp_path: Path) -> None:
    async with make(state_dir=tmp_path / "first") as first:
        await first.wait_until_active(LIMIT)
        await first.outbox.install()
        async with make(state_dir=tmp_path / "second") as second:
            tail = second.outbox.tail()
            async with asyncio.timeout(LIMIT):
                await anext(tail)
                await first.outbox.publish(sql, "orders", "1")
                (event,) = (await anext(tail)).events
                assert event.payload == "1"
            assert not second.monitor.conditions()["pg_lock_acquired"].met


@pytest.mark.parametrize("stopped", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_outbox_is_read_without_the_pooler_while_that_is_down_or_frozen(
    sql: Sql, streamed_url: str, stream_id: str, tmp_path: Path, stopped: signal.Signals
) -> None:
    binary, port = require_server("pgbouncer"), free_port()
    pooled = through(streamed_url, port)
    options = {"stream_id": stream_id, "state_dir": tmp_path, "pool_size": 2}
    async with Postgres(pooled, replication_url=streamed_url, **options) as pg:  # type: ignore[arg-type]
        with pgbouncer(binary, streamed_url, port=port):
            await pg.wait_until_active(LIMIT)
            await pg.outbox.install()
            (pooler,) = (each for each in psutil.Process().children() if each.name() == "pgbouncer")
            pooler.send_signal(stopped)
            async with asyncio.timeout(3 * GIVEN_UP):
                await pg.outbox.publish(sql, "orders", "1")
                while True:
                    try:
                        (event,) = (await pg.outbox.read()).events
                        break
                    except (psycopg.OperationalError, TimeoutError):  # the connection that was lost
                        await asyncio.sleep(0.05)
            assert event.payload == "1"


async def test_a_page_is_not_waited_for_while_the_pooler_is_frozen(
    sql: Sql,
    streamed_url: str,
    stream_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    binary, port = require_server("pgbouncer"), free_port()
    pooled = through(streamed_url, port)
    options = {"stream_id": stream_id, "state_dir": tmp_path, "pool_size": 2}
    async with Postgres(pooled, replication_url=streamed_url, **options) as pg:  # type: ignore[arg-type]
        with pgbouncer(binary, streamed_url, port=port):
            await pg.wait_until_active(LIMIT)
            await pg.outbox.install()
            await pg.outbox.publish(sql, "orders", "1")
            (pooler,) = (each for each in psutil.Process().children() if each.name() == "pgbouncer")
            looks = pg.outbox._reader.looks
            look = looks.from_now

            async def then_frozen() -> Look:
                found = await look()
                pooler.send_signal(signal.SIGSTOP)
                return found

            with monkeypatch.context() as before_the_page:
                before_the_page.setattr(looks, "from_now", then_frozen)
                with pytest.raises(psycopg.OperationalError):
                    async with asyncio.timeout(3 * GIVEN_UP):
                        await pg.outbox.read()
            (event,) = (await pg.outbox.read()).events
            assert event.payload == "1"


async def test_the_connections_of_the_outbox_are_closed_to_sleep(
    make: MakePostgres, sql: Sql
) -> None:
    others = (
        "select count(*) from pg_stat_activity where datname = current_database() "
        "and pid <> pg_backend_pid() and backend_type = 'client backend'"
    )

    async def alone() -> bool:
        return bool(await one(sql, others) == 0)

    async with make() as pg:
        await pg.outbox.install()
        await pg.sleep()
        await until(alone)
        assert (await pg.outbox.read()).events == []
