"""How soon after an outage is the first change streamed again?

Each figure starts when the database is back, or at the cause if the database was not away, and
ends when a consumer receives a row that was written after that. Each round has new instances, so
that the backoff starts at its shortest step: 1 s plus up to 50 % jitter (`BACKOFF`). A recovery
that waits for a retry should take one such step and half a second to connect; that is the target
of all figures except the time to detect a black hole.

If the server was away for longer than the shortest step, a later retry with a longer wait finds it.
Such a round is repeated: it would measure how long the server was away.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from _harness import Figure, Report, main, spread
from _recovery_side import CONSUMER, TABLE
from moored.embedded import EmbeddedPostgres
from moored.postgres import Changes, Postgres, Transaction
from moored.postgres.manage._stack import BACKOFF
from moored.testing import FaultProxy

LIMIT = 60.0
#: The consumers of `many_consumers`, and the tables of each.
CONSUMERS, TABLES = 40, 20
_SIDE = Path(__file__).with_name("_recovery_side.py")


class Database:
    """A server with a table, and state directories for its instances."""

    def __init__(self, server: EmbeddedPostgres, directory: Path) -> None:
        self.server = server
        self._directory = directory
        self._rows = 0
        self._instances = 0

    def state_dir(self) -> Path:
        """Return a new state directory for an instance."""
        self._instances += 1
        return self._directory / f"state-{self._instances}"

    async def clear(self) -> None:
        """Recreate the table, and drop the slot and the publication of the last round."""
        async with await self.connected() as conn:
            for text in (
                f"drop table if exists {TABLE}",
                f"create table {TABLE} (id int primary key)",
                "drop publication if exists moored_publication_default",
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots",
            ):
                await conn.execute(text.encode())

    async def connected(self) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self.server.url, autocommit=True)

    async def write(self) -> int:
        """Insert a row; return its number."""
        self._rows += 1
        async with await self.connected() as conn:
            await conn.execute(f"insert into {TABLE} values (%s)".encode(), (self._rows,))
        return self._rows

    @asynccontextmanager
    async def following(self, **options: Any) -> AsyncIterator[Follower]:
        """Run an instance; yield its consumer when it streams."""
        async with Postgres(
            self.server.url, pool_size=2, **{"state_dir": self.state_dir(), **options}
        ) as pg:
            follower = Follower(pg)
            await pg.wait_until_published(TABLE, timeout=LIMIT)
            await follower.wait_for_row(await self.write())
            yield follower


class Follower:
    """A consumer that acknowledges everything."""

    def __init__(self, pg: Postgres) -> None:
        self.pg = pg
        self._changes: Changes = pg.changes(CONSUMER, tables=[TABLE])

    async def wait_for_row(self, row: int) -> float:
        """Wait for a transaction with exactly this row; return the time of its arrival."""
        async with asyncio.timeout(LIMIT):
            async for item in self._changes:
                if isinstance(item, Transaction):
                    now = time.perf_counter()
                    await item.ack()
                    if [change.new["id"] for change in item if change.new] == [row]:
                        return now
        raise AssertionError("the stream has ended")


# -- the figures, in seconds --------------------------------------------------------------------


async def restart(database: Database) -> float:
    """Restart the server, as for an update."""
    async with database.following() as follower:
        return await _after(database, follower, database.server.restart)


async def kill9(database: Database) -> float:
    """Kill the server and start it again."""

    async def kill_and_start() -> None:
        await database.server.kill()
        await database.server.start()

    async with database.following() as follower:
        return await _after(database, follower, kill_and_start)


async def _after(
    database: Database, follower: Follower, outage: Callable[[], Awaitable[None]]
) -> float:
    begin = time.perf_counter()
    await outage()
    back = time.perf_counter()
    took = await _first_change(database, follower, back)
    if back - begin > BACKOFF[0]:
        raise OutageTooLong(took)
    return took


class OutageTooLong(Exception):
    """The server was away for longer than the shortest backoff; has the figure nevertheless."""

    def __init__(self, took: float) -> None:
        super().__init__()
        self.took = took


async def lock_handover(database: Database) -> float:
    """Close the owner of the lock, as in a rolling deploy, while another instance waits for it."""
    async with database.following() as owner, _waiting(database) as follower:
        begin = time.perf_counter()
        closing = asyncio.create_task(owner.pg.close())
        try:
            return await _first_change(database, follower, begin)
        finally:
            await closing


async def lock_handover_kill9(database: Database) -> float:
    """Kill the process of the owner of the lock."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_SIDE),
        database.server.url,
        str(database.state_dir()),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        if await owner.stdout.readline() != b"active\n":
            raise AssertionError("the owner did not start to stream")
        async with _waiting(database) as follower:
            begin = time.perf_counter()
            owner.kill()
            return await _first_change(database, follower, begin)
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


@asynccontextmanager
async def _waiting(database: Database) -> AsyncIterator[Follower]:
    """Run an instance; yield its consumer when the instance waits for the lock."""
    async with Postgres(database.server.url, pool_size=2, state_dir=database.state_dir()) as pg:
        follower = Follower(pg)
        async with asyncio.timeout(LIMIT):
            async for event in pg.events():
                if event.name == "waiting_for_connection_lock":
                    break
        yield follower


async def wake(database: Database) -> float:
    """Wake an instance that sleeps, with all connections closed."""
    async with database.following() as follower:
        await follower.pg.sleep()
        begin = time.perf_counter()
        await follower.pg.wake()
        return await _first_change(database, follower, begin)


async def blackhole(database: Database) -> tuple[float, float]:
    """Drop all packets; return the seconds until that is detected, and from heal to a row."""
    url = database.server.url
    port = str(conninfo_to_dict(url)["port"])
    async with FaultProxy("127.0.0.1", int(port)) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        async with database.following(replication_url=through) as follower:
            monitor = follower.pg.monitor
            proxy.black_hole()
            begin = time.perf_counter()
            await monitor.wait_until(lambda status: status.health.value != "active", LIMIT)
            noticed = time.perf_counter()
            proxy.resume()
            back = await _first_change(database, follower, noticed)
            return noticed - begin, back


async def many_consumers(database: Database) -> float:
    """Cut the stream of 40 consumers of 20 tables; wait until each has a new row."""
    tables = [f"{TABLE}_{n}" for n in range(TABLES)]
    async with await database.connected() as conn:
        for table in tables:
            await conn.execute(f"drop table if exists {table}".encode())
            await conn.execute(f"create table {table} (id int primary key)".encode())
    async with database.following() as follower, AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(follower.pg.changes(f"many-{n}", tables=tables))
            for n in range(CONSUMERS)
        ]
        await follower.pg.wait_until_published(*tables, timeout=LIMIT)
        async with await database.connected() as conn:
            begin = time.perf_counter()
            await conn.execute(
                b"select pg_terminate_backend(active_pid) from pg_replication_slots where active"
            )
            await conn.execute(f"insert into {tables[-1]} values (1)".encode())
        async with asyncio.timeout(LIMIT):
            items = await asyncio.gather(*(anext(changes) for changes in consumers))
        if not all(isinstance(item, Transaction) for item in items):
            raise AssertionError("a consumer got a Reset")
        return time.perf_counter() - begin


async def _first_change(database: Database, follower: Follower, begin: float) -> float:
    return await follower.wait_for_row(await database.write()) - begin


# -- the rounds ---------------------------------------------------------------------------------


async def rounds(
    database: Database, trial: Callable[[Database], Awaitable[Any]], number: int
) -> list[Any]:
    found: list[Any] = []
    repeated = 0
    while len(found) < number:
        await _wait_until_slots_idle(database)
        await database.clear()
        try:
            found.append(await trial(database))
        except OutageTooLong as long:
            repeated += 1
            if repeated > 2 * number:  # the machine is too slow: keep the figure
                found.append(long.took)
    return found


async def _wait_until_slots_idle(database: Database) -> None:
    """Wait until no slot is active: the instance of the last round may still disconnect."""
    query = b"select count(*) from pg_replication_slots where active"
    async with asyncio.timeout(LIMIT), await database.connected() as conn:
        while True:
            row = await (await conn.execute(query)).fetchone()
            if row == (0,):
                return
            await asyncio.sleep(0.05)


def milliseconds(seconds: list[float]) -> Figure:
    return spread([each * 1000 for each in seconds], "ms")


async def measure_all(report: Report, number: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with EmbeddedPostgres() as server:
            database = Database(server, Path(directory))
            trials = (restart, kill9, lock_handover, lock_handover_kill9, wake, many_consumers)
            for trial in trials:
                figure = milliseconds(await rounds(database, trial, number))
                report.add(f"{trial.__name__}_ms", figure)
            silent = await rounds(database, blackhole, max(1, number // 2))
            report.add("blackhole_detect_ms", milliseconds([noticed for noticed, _ in silent]))
            report.add("blackhole_return_ms", milliseconds([back for _, back in silent]))


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.ERROR)  # the errors of the outages are expected
    number = 1 if quick else 7
    asyncio.run(measure_all(report, number))
    report.notes.append(
        f"{number} rounds of each, in brackets the minimum and the maximum; every row was checked"
    )


if __name__ == "__main__":
    main("recovery", (__doc__ or "").splitlines()[0], measure)
