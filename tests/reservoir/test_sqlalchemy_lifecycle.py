"""Engines and connections that are not closed, forks, and event loops that end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine
from tests.programs import run_program
from tests.reservoir.engines import PID, WAYS, Desk, Way, backends, left
from tests.reservoir.harness import until

from moored.reservoir import ReservoirConfig
from moored.reservoir.sqlalchemy import create_engine, reservoir_of


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def in_a_cycle(thing: object) -> None:
    """Let only the garbage collector find it."""
    cycle = [thing]
    cycle.append(cycle)


async def pid_of(engine: AsyncEngine) -> Any:
    async with engine.connect() as conn:
        return await conn.scalar(text(PID))


# -- not closed ------------------------------------------------------------------------------------


async def test_a_connection_that_is_not_closed_is_returned_by_the_garbage_collector(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:
        held = await desk.take()
        first = await held.ask()
        in_a_cycle(held)
        del held
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")  # SQLAlchemy complains, under asyncio
            # A thread that has just used it may refer to it for a moment longer.
            await until(lambda: (gc.collect(), desk.now.in_use)[1] == 0, "it was found")
        # SQLAlchemy keeps it, under threads; else it must be ended, and must not be missing.
        assert (await desk.ask() == first) == (way == "threads")
        assert desk.now.discards == ({} if way == "threads" else {"bad": 1})


@pytest.mark.parametrize("poolclass", [None, NullPool])
def test_the_garbage_collector_may_return_a_connection_while_the_lock_is_held(
    poolclass: Any, postgres_url: str
) -> None:
    """It may do so where a thread holds the lock that the connection's way back would take."""
    engine = create_engine(postgres_url, config=ReservoirConfig(max_size=1), poolclass=poolclass)
    gc.disable()
    try:
        conn = engine.connect()
        first = conn.scalar(text(PID))
        in_a_cycle(conn)
        del conn

        def collect() -> None:
            with reservoir_of(engine).reservoir.lock:
                gc.collect()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    with engine.connect() as conn:
        assert conn.scalar(text(PID)) == first
    assert reservoir_of(engine).statistics().discards == {}
    engine.dispose()


async def test_a_garbage_collected_engine_closes_its_connections(
    way: Way, postgres_url: str
) -> None:
    desk = Desk(way, postgres_url, pool_size=2, max_overflow=0)
    await desk.ask()
    del desk
    await until(lambda: (gc.collect(), backends(postgres_url))[1] == set(), "nothing is left")


@pytest.mark.parametrize("way", ["psycopg", "asyncpg"])
async def test_dispose_of_the_sync_engine_closes_the_pool(way: Way, postgres_url: str) -> None:
    desk = Desk(way, postgres_url, pool_size=2, max_overflow=0)
    await desk.ask()
    desk.sync_engine.dispose()
    await left(postgres_url)


# -- another process -------------------------------------------------------------------------------


def from_a_child(ask: Callable[[], int]) -> int:
    """What a forked child answers."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks where there are threads
        child = os.fork()
    if not child:
        try:
            os.write(writer, str(ask()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return int(found)


async def test_a_child_has_connections_of_its_own(way: Way, postgres_url: str) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:
        first = await desk.ask()
        engine = desk.engine

        def ask() -> int:
            if isinstance(engine, AsyncEngine):
                return int(asyncio.run(pid_of(engine)))
            with engine.connect() as conn:
                return int(conn.scalar(text(PID)) or 0)

        theirs = from_a_child(ask)
        assert theirs != first
        await left(postgres_url, first)
        # It did not touch ours, not even to say farewell.
        assert await desk.ask() == first
        assert desk.now.discards == {}


# -- another loop ----------------------------------------------------------------------------------


OUTLIVED = """
import asyncio, logging, sys
from sqlalchemy import text
from moored.reservoir.sqlalchemy import create_async_engine, reservoir_of

logging.basicConfig(level="WARNING")
engine = create_async_engine(sys.argv[1], pool_size=1, max_overflow=0)

async def pid(last):
    async with engine.connect() as conn:
        found = await conn.scalar(text("select pg_backend_pid()"))
        others = "pid <> pg_backend_pid() and datname = current_database()"
        others = text(f"select count(*) from pg_stat_activity where {others}")
        while last and await conn.scalar(others):
            await asyncio.sleep(0.01)
    if last:
        await engine.dispose()
    return found

print(asyncio.run(pid(False)) != asyncio.run(pid(True)))
"""


def test_an_engine_works_on_a_new_loop_after_its_loop_has_ended(
    postgres_url: str, tmp_path: Path
) -> None:
    """With SQLAlchemy's own connections this is an error; a reservoir can begin anew.

    In a process of its own, because what a loop leaves behind when it is ended under a supervisor
    is found by a garbage collector, at any time.
    """
    url = make_url(postgres_url).set(drivername="postgresql+psycopg")
    script = tmp_path / "program.py"
    script.write_text(OUTLIVED)
    done = run_program(str(script), url.render_as_string(hide_password=False), timeout=60)
    assert done.stdout == "True\n", done.stderr
    assert "its event loop has ended" in done.stderr


async def test_an_engine_is_refused_on_a_second_running_loop(postgres_url: str) -> None:
    async with Desk("psycopg", postgres_url, pool_size=2, max_overflow=0) as desk:
        await desk.ask()
        assert isinstance(desk.engine, AsyncEngine)
        with pytest.raises(RuntimeError, match="runs on another event loop"):
            await asyncio.to_thread(asyncio.run, pid_of(desk.engine))
        assert await desk.ask("select 1") == 1


def test_two_threads_open_the_pool_of_an_engine_once(postgres_url: str) -> None:
    for _ in range(5):
        engine = create_engine(postgres_url, pool_size=4, max_overflow=0)
        together = threading.Barrier(4)
        errors: list[BaseException] = []

        def use(
            engine: Engine = engine,
            together: threading.Barrier = together,
            errors: list[BaseException] = errors,
        ) -> None:
            try:
                together.wait()
                with engine.connect() as conn:
                    _used(conn)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.dispose()
        assert errors == []


def _used(conn: Connection) -> None:
    assert conn.scalar(text("select 1")) == 1
