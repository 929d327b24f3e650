"""The `close` event of SQLAlchemy fires once for each connection whose `connect` event fired."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from tests.programs import run_program
from tests.reservoir.engines import WAYS, Desk, SteppedClock, Way, terminate, unseen
from tests.reservoir.harness import LIMIT, until

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import awaited
from moored.reservoir.sqlalchemy import create_engine, reservoir_of


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


class Gauge:
    """The open connections of an engine, as its events tell them."""

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self.opened: list[Any] = []
        self.closed: list[Any] = []
        self.detached: list[Any] = []
        target = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        event.listen(target, "connect", lambda conn, record: self.opened.append(conn))
        event.listen(target, "close", self._close)
        event.listen(target, "close_detached", self.detached.append)

    def _close(self, conn: Any, record: Any) -> None:
        assert record.dbapi_connection is conn
        self.closed.append(conn)

    @property
    def open(self) -> int:
        """Open connections; raises if an event has fired twice, or for another connection."""
        gone = [*map(id, self.closed), *map(id, self.detached)]
        assert len(set(gone)) == len(gone)
        assert set(gone) <= set(map(id, self.opened))
        assert len(set(map(id, self.opened))) == len(self.opened)
        return len(self.opened) - len(gone)


async def test_after_dispose_each_connection_was_closed_once(way: Way, module_url: str) -> None:
    async with Desk(way, module_url, pool_size=4, max_overflow=0) as desk:
        gauge = Gauge(desk.engine)
        held = await desk.take_all(3)
        await held[0].close()
        await until(lambda: desk.full, "one connection was never used")
        assert (len(gauge.opened), gauge.open) == (3, 3)
        await desk.dispose()
        assert gauge.open == 2
        await desk.ask()
        assert gauge.open == 3
        for one in held[1:]:
            await one.close()
        await until(lambda: gauge.open == 1, "those that were in use are closed")
    assert gauge.open == 0


async def test_expired_connections_are_closed_in_the_events(way: Way, module_url: str) -> None:
    clock = SteppedClock()
    options = {"config": unseen(max_size=2), "clock": clock}
    async with Desk(way, module_url, **options) as desk:
        gauge = Gauge(desk.engine)
        for _ in range(5):
            for one in await desk.take_all(2):
                await one.close()
            clock.ahead += 36_000.0
        await desk.ask()
        await until(lambda: not desk.now.closing, "the old ones are closed")
        assert len(gauge.opened) >= 10
        assert gauge.open <= 2
    assert gauge.open == 0


async def test_lost_connections_are_closed_in_the_events(way: Way, module_url: str) -> None:
    async with Desk(way, module_url, pool_size=3, max_overflow=0) as desk:
        gauge = Gauge(desk.engine)
        held = await desk.take_all(3)
        pids = [await one.ask() for one in held]
        await held[0].close()
        terminate(module_url, *pids)
        for one in held[1:]:
            with pytest.raises(Exception, match=r"."):
                await one.ask()
            await one.close()
        await desk.ask()
        await until(lambda: not desk.now.closing and gauge.open <= 1, "the lost ones are closed")
    assert gauge.open == 0


async def test_killed_connections_are_closed_in_the_events(way: Way) -> None:
    """The server ends all its processes when one of them was killed."""
    with SyncEmbeddedPostgres(stop_timeout=1.0) as server:
        async with Desk(way, server.url, pool_size=3, max_overflow=0) as desk:
            gauge = Gauge(desk.engine)
            held = await desk.take_all(3)
            pids = [await one.ask() for one in held]
            await held[0].close()
            os.kill(pids[1], signal.SIGKILL)
            for one in held[1:]:
                with suppress(SQLAlchemyError):
                    await one.ask()
                with suppress(SQLAlchemyError):  # it rolls back, and may find it out only then
                    await one.close()
            await until(lambda: gauge.open == 0, "the lost ones are closed")
        assert (len(gauge.opened), gauge.open) == (3, 0)


@pytest.mark.parametrize("soft", [False, True])
async def test_an_invalidated_connection_is_closed_once(
    soft: bool, way: Way, module_url: str
) -> None:
    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:
        gauge = Gauge(desk.engine)

        def invalidate(conn: Connection) -> None:
            if soft:
                conn.connection._connection_record.invalidate(soft=True)
            else:
                conn.invalidate()

        for _ in range(3):
            held = await desk.take()
            if isinstance(held.conn, Connection):
                invalidate(held.conn)
            else:
                await held.conn.run_sync(invalidate)
            await held.close()
            await desk.ask()
        assert (len(gauge.opened), gauge.open) == (4, 1)
    assert gauge.open == 0


async def test_a_detached_connection_has_the_event_of_detached_ones(
    way: Way, module_url: str
) -> None:
    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:
        gauge = Gauge(desk.engine)
        await desk.run(lambda conn: conn.detach())
        await until(lambda: not desk.now.in_use and not desk.now.closing, "it is closed")
        assert (len(gauge.closed), len(gauge.detached), gauge.open) == (0, 1, 0)


async def test_a_listener_that_raises_does_not_keep_a_connection_open(
    way: Way, module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:

        def fail(conn: Any, record: Any) -> None:
            raise ValueError("broken gauge")

        event.listen(desk.sync_engine, "close", fail)
        await desk.ask()
        pool = desk.pool
        await desk.dispose()
        assert pool.statistics().closing == 0
    assert "a close listener failed: broken gauge (ValueError)" in caplog.text


async def test_a_listener_that_hangs_does_not_keep_a_connection_open(
    way: Way, module_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that queries, over the connection that is closed, a server that has vanished."""
    monkeypatch.setattr("moored.reservoir._upkeep.CLOSE_PATIENCE", 0.2)
    forever = threading.Event()

    def hang(conn: Any, record: Any) -> None:
        if hasattr(conn, "run_async"):
            conn.run_async(lambda _: asyncio.get_running_loop().create_future())
        else:
            forever.wait()

    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:
        event.listen(desk.sync_engine, "close", hang)
        first = await desk.ask()
        await awaited(desk.pool.drain())
        try:
            async with asyncio.timeout(LIMIT):
                assert await desk.ask() != first, "it is replaced"
            assert "a close listener failed: it did not end within 0.2 s" in caplog.text
        finally:
            forever.set()


def test_a_child_process_counts_only_its_own_connections(module_url: str) -> None:
    engine = create_engine(module_url, pool_size=1, max_overflow=0)
    gauge = Gauge(engine)
    with engine.connect() as conn:
        conn.scalar(text("select 1"))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks where there are threads
        child = os.fork()
    if not child:
        before = gauge.open
        with engine.connect() as conn:
            conn.scalar(text("select 1"))
        engine.dispose()
        os.write(writer, f"{before} {len(gauge.opened)} {gauge.open}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        # That of the parent stays open: the child must not close it.
        assert answer.read() == "1 2 1"
    os.waitpid(child, 0)
    assert gauge.open == 1
    assert reservoir_of(engine).statistics().discards == {}
    engine.dispose()
    assert gauge.open == 0


LOOPS = """
import asyncio, gc, sys
from sqlalchemy import event, text
from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import awaited
from moored.reservoir.sqlalchemy import create_async_engine

engine = create_async_engine(sys.argv[1], pool_size=2, max_overflow=0)
counts = {"connect": 0, "close": 0}
for name in counts:
    def count(conn, record, name=name):
        counts[name] += 1
    event.listen(engine.sync_engine, name, count)

async def use(last):
    async with engine.connect() as first, engine.connect() as second:
        await second.execute(text("select 1"))
    if last:
        await engine.dispose()

for last in (False, False, True):
    asyncio.run(use(last))
print(counts)
"""


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_connections_of_an_ended_loop_are_closed_in_the_events(
    driver: str, postgres_url: str, tmp_path: Path
) -> None:
    url = make_url(postgres_url).set(drivername=f"postgresql+{driver}")
    script = tmp_path / "program.py"
    script.write_text(LOOPS)
    done = run_program(str(script), url.render_as_string(hide_password=False), timeout=60)
    assert done.stdout == "{'connect': 6, 'close': 6}\n", done.stderr
