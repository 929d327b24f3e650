"""SQLAlchemy's engines with many callers, and with a server that is down or ends connections."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, OperationalError
from tests.reservoir.engines import WAYS, Desk, Way, terminate
from tests.reservoir.harness import Gate, until
from tests.reservoir.support import eventually
from tests.servers import free_port

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import _core, _item
from moored.reservoir.sqlalchemy import create_engine, reservoir_of


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def test_a_thread_that_returns_its_connection_queues_behind_the_waiters(module_url: str) -> None:
    engine = create_engine(module_url, pool_size=1, max_overflow=0)
    served: list[int] = []

    def work(number: int) -> None:
        with engine.connect() as conn:
            conn.execute(text("select 1"))
            served.append(number)

    with ThreadPoolExecutor(4) as crew:
        with engine.connect():
            waiting = []
            for number in range(4):
                waiting.append(crew.submit(work, number))
                eventually(lambda: reservoir_of(engine).statistics().waiting == len(waiting))
        work(4)
        for each in waiting:
            each.result()
    engine.dispose()
    assert served == [0, 1, 2, 3, 4]


async def test_a_server_that_is_down_is_an_operational_error_at_once(way: Way) -> None:
    url = f"postgresql://app@127.0.0.1:{free_port()}/orders"
    async with Desk(way, url, pool_size=2, max_overflow=0, pool_timeout=600.0) as desk:
        for _ in range(3):
            with pytest.raises(OperationalError):
                async with asyncio.timeout(30.0):
                    await desk.ask()


async def test_an_engine_works_again_when_its_server_is_back(
    way: Way, postgres: SyncEmbeddedPostgres, module_url: str
) -> None:
    with Gate("127.0.0.1", postgres.port).in_thread() as gate:
        async with Desk(way, gate.url(module_url), pool_size=2, max_overflow=0) as desk:
            assert await desk.ask("select 1") == 1
            gate.refuse()
            await gate.cut()
            for _ in range(3):
                with pytest.raises(Exception, match=r"."):
                    await desk.ask("select 1")
            gate.refuse(False)
            await until(lambda: desk.now.size, "a connection is there")
            assert await desk.ask("select 1") == 1


async def test_callers_meet_a_killed_connection_once_at_most(
    way: Way, module_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first error every other connection is pinged before a caller gets it."""
    # However long the kill takes, it is too short a time for the look at an idle socket.
    for module in (_core, _item):
        monkeypatch.setattr(module, "FRESH", 60.0)
    async with Desk(way, module_url, pool_size=4, max_overflow=0) as desk:
        for _ in range(3):
            held = await desk.take_all(4)
            pids = [await one.ask() for one in held]
            for one in held:
                await one.close()
            terminate(module_url, *pids)
            errors: list[BaseException] = []
            for _ in range(5):
                try:
                    await desk.ask("select 1")
                except Exception as error:
                    errors.append(error)
            assert len(errors) == 1, errors
            assert isinstance(errors[0], DBAPIError)


async def test_the_connect_event_fires_once_for_each_connection(way: Way, module_url: str) -> None:
    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:
        seen: list[Any] = []
        event.listen(desk.sync_engine, "connect", lambda dbapi, record: seen.append(dbapi))
        for _ in range(3):
            await desk.ask("select 1")
        assert len(seen) == 1
        pool: Any = desk.sync_engine.pool
        assert (pool.size(), pool.checkedin(), pool.checkedout(), pool.overflow()) == (1, 1, 0, 0)
        assert pool.status() == repr(reservoir_of(desk.engine))
