"""A stream whose state file is locked or deleted while it runs."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import pytest

from moored.kernel import Recorder
from moored.postgres import History, Rows
from moored.postgres.consume import Hub, StateStore
from moored.postgres.consume._store import PATIENCE

from .conftest import MakePostgres, Sql
from .server import LIMIT, following, ids, quicken, until

#: How long the file is locked, and how long the event loop may be held at most meanwhile: if it
#: waited for the file, which is unlocked by the loop, it would for PATIENCE.
LOCKED, HELD = 1.5, 0.8 * PATIENCE


@pytest.fixture
def path(tmp_path: Path, stream_id: str) -> Path:
    return tmp_path / f"{stream_id}.db"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file as a backup or a shell with an open transaction does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        yield
        other.execute("rollback")


@asynccontextmanager
async def loop_runs() -> AsyncIterator[None]:
    """Measure how long the event loop does nothing else."""
    loop, longest = asyncio.get_running_loop(), 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - before)

    beating = asyncio.create_task(beat())
    try:
        yield
        await asyncio.sleep(LOCKED)
    finally:
        beating.cancel()
    assert longest < HELD, f"the event loop was held for {longest:.2f} s"


async def test_the_event_loop_runs_while_consumers_attach_to_a_locked_state_file(
    make: MakePostgres, sql: Sql, path: Path
) -> None:
    async with make() as pg:
        first = pg.changes("first", tables=["orders"])
        await pg.wait_until_published(timeout=LIMIT)
        await sql.execute("insert into orders values (1, 'x')")
        txn = await following(first)
        with locked(path):
            async with loop_runs():
                await first.aclose()
                again = pg.changes("first", tables=["orders"])
                new = pg.changes("new", tables=["orders"])
                placed = pg.changes("placed", tables=["orders"], start=txn.position)
                follow = pg.follow("orders", consumer="copy")
                copying = asyncio.create_task(anext(follow))
        assert await following(again)
        await pg.wait_until_published(timeout=LIMIT)
        assert isinstance(await asyncio.wait_for(copying, LIMIT), Rows)
        await sql.execute("insert into orders values (2, 'x')")
        for changes in (again, new, placed):
            assert ids(await following(changes)) == [2]
        await follow.aclose()
    with closing(StateStore(path)) as store:
        assert store.load().consumers.keys() == {"first", "new", "placed", "copy"}


async def test_the_event_loop_runs_while_a_stream_opens_and_closes_with_a_locked_state_file(
    make: MakePostgres, sql: Sql, path: Path
) -> None:
    async with make() as pg:
        await pg.wait_until_active(LIMIT)
    pg = make()
    with locked(path):
        async with loop_runs():
            opening = asyncio.create_task(pg.open())
    await asyncio.wait_for(opening, LIMIT)
    await pg.wait_until_active(LIMIT)
    with locked(path):
        async with loop_runs():
            closing_down = asyncio.create_task(pg.close())
    await asyncio.wait_for(closing_down, LIMIT)


async def test_a_new_consumer_is_stored_before_the_server_discards_anything(path: Path) -> None:
    with closing(StateStore(path)) as store:
        hub = Hub(store, Recorder())
        hub.begin(History("1", 1), 1000)
        with locked(path):
            changes = hub.attach("new")

        async def stored() -> bool:
            with closing(StateStore(path)) as other:
                return "new" in other.load().consumers

        await hub.checkpoint(1000)
        assert await stored()
        other = hub.attach("other")
        await hub.drop("other")
        await until(stored)
        with closing(StateStore(path)) as now:
            assert now.load().consumers.keys() == {"new"}
        del changes, other


# -- deleted files -------------------------------------------------------------------------------


async def test_a_stream_continues_after_each_deletion_of_its_state_directory(
    make: MakePostgres, sql: Sql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch)
    folder = tmp_path / "state"
    async with make(state_dir=folder) as pg:
        changes = pg.changes("search", tables=["orders"])
        await pg.wait_until_published("orders", timeout=LIMIT)
        events, path = pg.events(), folder / f"{pg.settings.stream_id}.db"

        async def stored() -> bool:
            if not path.exists():
                return False
            with closing(sqlite3.connect(path)) as file:
                query = "select 1 from consumers where delivered = ?"
                with suppress(sqlite3.OperationalError):  # its tables are being created
                    return file.execute(query, (str(txn.position.lsn),)).fetchone() is not None
            return False

        for number in (1, 2):
            shutil.rmtree(folder)
            await sql.execute("insert into orders values (%s, 'x')", (number,))
            txn = await following(changes)
            assert ids(txn) == [number]
            await txn.ack()
            async with asyncio.timeout(LIMIT):
                while (event := await anext(events)).name != "connection_error":
                    pass
            assert f"{path} was deleted" in event.detail
            await until(stored)
    async with make(state_dir=folder) as pg:
        changes = pg.changes("search", tables=["orders"])
        await sql.execute("insert into orders values (3, 'x')")
        assert ids(await following(changes)) == [3]
