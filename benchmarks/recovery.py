"""How long is it, after something broke, until the first change is streamed again?

Each figure begins with the database's return, or with the cause where the database was not away,
and ends when a consumer has a row that was written after it. Each round has instances of its own,
so that each begins with the shortest wait between two tries: 1 s, and up to half of it by chance
(`BACKOFF`). What must wait for a new try should be back within one such step and half a second to
connect: that is the target of all of them, except for the time until a silence is noticed.

A server that was away for longer than the shortest wait is met by the second try, or a later one,
after a longer wait. Such a round is repeated: it would measure how long the server was away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from _harness import Figure, Report, main
from _recovery_side import CONSUMER, TABLE
from moored.embedded import EmbeddedPostgres
from moored.postgres import Changes, Postgres, Transaction
from moored.postgres._postgres import BACKOFF
from moored.testing import FaultProxy

LIMIT = 60.0
#: How many consumers, of how many tables each, come back together.
CONSUMERS, TABLES = 40, 20
_SIDE = Path(__file__).with_name("_recovery_side.py")


class Place:
    """A server with a table, and directories for those who follow it."""

    def __init__(self, server: EmbeddedPostgres, directory: Path) -> None:
        self.server = server
        self._directory = directory
        self._rows = 0
        self._instances = 0

    def state_dir(self) -> Path:
        """A new place for the state of an instance."""
        self._instances += 1
        return self._directory / f"state-{self._instances}"

    async def clear(self) -> None:
        """A new table; and no slot, publication or instance of an earlier round."""
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
        """One more row; returns its number."""
        self._rows += 1
        async with await self.connected() as conn:
            await conn.execute(f"insert into {TABLE} values (%s)".encode(), (self._rows,))
        return self._rows

    @asynccontextmanager
    async def following(self, **options: Any) -> AsyncIterator[Follower]:
        """An instance that streams."""
        async with Postgres(
            self.server.url, pool_size=2, **{"state_dir": self.state_dir(), **options}
        ) as pg:
            follower = Follower(pg)
            await pg.wait_until_published(TABLE, timeout=LIMIT)
            await follower.has(await self.write())
            yield follower


class Follower:
    """A consumer that acknowledges everything, and can wait for a row."""

    def __init__(self, pg: Postgres) -> None:
        self.pg = pg
        self._changes: Changes = pg.changes(CONSUMER, tables=[TABLE])

    async def has(self, row: int) -> float:
        """When the row has come; it must come by itself, and with its value."""
        async with asyncio.timeout(LIMIT):
            async for item in self._changes:
                if isinstance(item, Transaction):
                    now = time.perf_counter()
                    await item.ack()
                    if [change.new["id"] for change in item if change.new] == [row]:
                        return now
        raise AssertionError("the stream has ended")


# -- the figures: seconds each ------------------------------------------------------------------


async def restart(place: Place) -> float:
    """The server is restarted, as for an update."""
    async with place.following() as follower:
        return await _after(place, follower, place.server.restart)


async def kill9(place: Place) -> float:
    """The server is killed, and recovers when it is started again."""

    async def kill_and_start() -> None:
        await place.server.kill()
        await place.server.start()

    async with place.following() as follower:
        return await _after(place, follower, kill_and_start)


async def _after(place: Place, follower: Follower, outage: Callable[[], Awaitable[None]]) -> float:
    begin = time.perf_counter()
    await outage()
    back = time.perf_counter()
    took = await _first_change(place, follower, back)
    if back - begin > BACKOFF[0]:
        raise TooLong(took)
    return took


class TooLong(Exception):
    """The server was away for longer than the shortest wait; with the figure all the same."""

    def __init__(self, took: float) -> None:
        super().__init__()
        self.took = took


async def lock_handover(place: Place) -> float:
    """The owner is closed, as in a rolling deploy, and another one waits for the lock."""
    async with place.following() as owner, _waiting(place) as follower:
        begin = time.perf_counter()
        closing = asyncio.create_task(owner.pg.close())
        try:
            return await _first_change(place, follower, begin)
        finally:
            await closing


async def lock_handover_kill9(place: Place) -> float:
    """The owner's process is killed."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        str(_SIDE),
        place.server.url,
        str(place.state_dir()),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        if await owner.stdout.readline() != b"active\n":
            raise AssertionError("the owner did not begin to stream")
        async with _waiting(place) as follower:
            begin = time.perf_counter()
            owner.kill()
            return await _first_change(place, follower, begin)
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


@asynccontextmanager
async def _waiting(place: Place) -> AsyncIterator[Follower]:
    """An instance that waits for the lock."""
    async with Postgres(place.server.url, pool_size=2, state_dir=place.state_dir()) as pg:
        follower = Follower(pg)
        async with asyncio.timeout(LIMIT):
            async for event in pg.events():
                if event.name == "waiting_for_connection_lock":
                    break
        yield follower


async def wake(place: Place) -> float:
    """All connections were closed for lack of use, and somebody needs them."""
    async with place.following() as follower:
        await follower.pg.sleep()
        begin = time.perf_counter()
        await follower.pg.wake()
        return await _first_change(place, follower, begin)


async def blackhole(place: Place) -> tuple[float, float]:
    """Nothing passes any more, and nobody says so: until it is noticed; and, healed, streams."""
    url = place.server.url
    port = str(conninfo_to_dict(url)["port"])
    async with FaultProxy("127.0.0.1", int(port)) as proxy:
        through = url.replace(f":{port}/", f":{proxy.port}/")
        async with place.following(replication_url=through) as follower:
            monitor = follower.pg.monitor
            proxy.black_hole()
            begin = time.perf_counter()
            await monitor.wait_until(lambda status: status.health.value != "active", LIMIT)
            noticed = time.perf_counter()
            proxy.resume()
            back = await _first_change(place, follower, noticed)
            return noticed - begin, back


async def many_consumers(place: Place) -> float:
    """The connection of 40 consumers of 20 tables each is cut: until all of them have a new row."""
    tables = [f"{TABLE}_{n}" for n in range(TABLES)]
    async with await place.connected() as conn:
        for table in tables:
            await conn.execute(f"drop table if exists {table}".encode())
            await conn.execute(f"create table {table} (id int primary key)".encode())
    async with place.following() as follower, AsyncExitStack() as stack:
        everybody = [
            await stack.enter_async_context(follower.pg.changes(f"many-{n}", tables=tables))
            for n in range(CONSUMERS)
        ]
        await follower.pg.wait_until_published(*tables, timeout=LIMIT)
        async with await place.connected() as conn:
            begin = time.perf_counter()
            await conn.execute(
                b"select pg_terminate_backend(active_pid) from pg_replication_slots where active"
            )
            await conn.execute(f"insert into {tables[-1]} values (1)".encode())
        async with asyncio.timeout(LIMIT):
            items = await asyncio.gather(*(anext(changes) for changes in everybody))
        if not all(isinstance(item, Transaction) for item in items):
            raise AssertionError("a consumer was told to begin anew")
        return time.perf_counter() - begin


async def _first_change(place: Place, follower: Follower, begin: float) -> float:
    return await follower.has(await place.write()) - begin


# -- the rounds ---------------------------------------------------------------------------------


async def rounds(place: Place, trial: Callable[[Place], Awaitable[Any]], number: int) -> list[Any]:
    found: list[Any] = []
    repeated = 0
    while len(found) < number:
        await _until_free(place)
        await place.clear()
        try:
            found.append(await trial(place))
        except TooLong as long:
            repeated += 1
            if repeated > 2 * number:  # it is so slow here: better a bad figure than none
                found.append(long.took)
    return found


async def _until_free(place: Place) -> None:
    """Until nothing reads from the slot any more: the one before has ended a moment ago."""
    query = b"select count(*) from pg_replication_slots where active"
    async with asyncio.timeout(LIMIT), await place.connected() as conn:
        while True:
            row = await (await conn.execute(query)).fetchone()
            if row == (0,):
                return
            await asyncio.sleep(0.05)


def milliseconds(seconds: list[float]) -> Figure:
    values = [each * 1000 for each in seconds]
    return Figure(statistics.median(values), "ms", min(values), max(values))


async def measure_all(report: Report, number: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with EmbeddedPostgres() as server:
            place = Place(server, Path(directory))
            trials = (restart, kill9, lock_handover, lock_handover_kill9, wake, many_consumers)
            for trial in trials:
                figure = milliseconds(await rounds(place, trial, number))
                report.add(f"{trial.__name__}_ms", figure)
            silent = await rounds(place, blackhole, max(1, number // 2))
            report.add("blackhole_detect_ms", milliseconds([noticed for noticed, _ in silent]))
            report.add("blackhole_return_ms", milliseconds([back for _, back in silent]))


def measure(report: Report, quick: bool) -> None:
    logging.disable(logging.ERROR)  # what breaks here is broken on purpose
    number = 1 if quick else 7
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    asyncio.run(measure_all(report, number))
    report.notes.append(
        f"{number} rounds of each, in brackets the extremes; every row was checked; the load was "
        f"{load:.1f} on {processors} processors before, {os.getloadavg()[0]:.1f} after"
        + (" (too busy to believe the figures)" if load > processors else "")
    )


if __name__ == "__main__":
    main("recovery", (__doc__ or "").splitlines()[0], measure)
