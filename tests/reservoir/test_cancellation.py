"""Callers that are cancelled during a statement: the server must end the statement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import psycopg
import pytest
from tests.reservoir.engines import Desk, Way
from tests.reservoir.harness import Rig, Shell, until

from moored.leases import Leases, MemoryStore
from moored.reservoir import AsyncConnectionPool

pytestmark = pytest.mark.every_loop

SIZE = 2
CANCELLED = 5

Ask = Callable[[str], Coroutine[Any, Any, Any]]


class Sleepers:
    """Sends statements that outlast the test, cancels their callers, and looks for them in the
    server's own list."""

    def __init__(self, observer: psycopg.Connection[Any]) -> None:
        self._observer = observer
        self._number = 0

    def running(self, marker: str = "") -> int:
        """How many backends execute such a statement."""
        query = """select count(*) from pg_stat_activity where datname = current_database()
                   and wait_event = 'PgSleep' and query like %s"""
        row = self._observer.execute(query, [f"%{marker}"]).fetchone()
        return int(row[0]) if row is not None else 0

    def _next(self) -> tuple[str, str]:
        self._number += 1
        marker = f"-- {self._number}."
        return f"select pg_sleep(60) {marker}", marker

    async def cancel_level(self, ask: Ask) -> None:
        """Cancel as anyio does: each await is cancelled, also while the caller cleans up."""
        query, marker = self._next()
        async with anyio.create_task_group() as group:
            group.start_soon(ask, query)
            await until(lambda: self.running(marker), "the statement runs")
            group.cancel_scope.cancel()

    async def cancel_edge(self, ask: Ask) -> None:
        """Cancel as asyncio does: once."""
        query, marker = self._next()
        task = asyncio.ensure_future(ask(query))
        await until(lambda: self.running(marker), "the statement runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def sleepers(observer: psycopg.Connection[Any]) -> Sleepers:
    return Sleepers(observer)


@pytest.mark.parametrize("cancel", [Sleepers.cancel_level, Sleepers.cancel_edge])
@pytest.mark.parametrize("shell", ["asyncio", "asyncpg"])
async def test_a_cancelled_statement_ends_at_the_server_and_its_connection_is_used_again(
    shell: Shell, cancel: Any, module_url: str, sleepers: Sleepers
) -> None:
    async with Rig(shell, module_url, max_size=SIZE) as rig:
        await rig.full()
        for _ in range(CANCELLED):
            await cancel(sleepers, rig.ask)
            assert await rig.ask("select 1") == 1
            assert sleepers.running() <= SIZE
        await until(lambda: not sleepers.running(), "every statement has ended")
        assert rig.now.refills == SIZE, "a connection had to be replaced"


async def test_a_transaction_of_a_cancelled_caller_is_rolled_back_and_its_connection_is_kept(
    module_url: str, sleepers: Sleepers
) -> None:
    async with AsyncConnectionPool(module_url, max_size=1) as pool:
        async with pool.connection() as conn:
            await conn.execute("create table if not exists work (id int)")

        async def insert_and_sleep(query: str) -> None:
            async with pool.connection() as conn:
                await conn.execute("insert into work values (1)")
                await conn.execute(query)

        await sleepers.cancel_level(insert_and_sleep)
        async with pool.connection() as conn:
            assert await (await conn.execute("select count(*) from work")).fetchone() == (0,)
        assert pool.statistics().refills == 1


async def test_the_lease_of_a_cancelled_connection_is_released_after_its_statement_has_ended(
    module_url: str, sleepers: Sleepers
) -> None:
    async with (
        Leases(MemoryStore()) as leases,
        Rig("asyncio", module_url, max_size=SIZE, leases=leases) as rig,
    ):
        await rig.full()
        for _ in range(CANCELLED):
            # What is given back by hand in a cancelled scope is closed.
            await sleepers.cancel_level(lambda query: _take_and_ask(rig, query))
            held = await leases.held()
            assert sleepers.running() <= len(held) <= SIZE


async def _take_and_ask(rig: Rig, query: str) -> None:
    conn = await rig.take()
    try:
        await rig.execute(conn, query)
    finally:
        await rig.give(conn)


@pytest.mark.parametrize("cancel", [Sleepers.cancel_level, Sleepers.cancel_edge])
@pytest.mark.parametrize("way", ["psycopg", "asyncpg"])
async def test_a_cancelled_statement_of_sqlalchemy_ends_before_another_connection_is_opened(
    way: Way, cancel: Any, module_url: str, sleepers: Sleepers
) -> None:
    async with Desk(way, module_url, pool_size=SIZE, max_overflow=0) as desk:
        for _ in range(CANCELLED):
            await cancel(sleepers, desk.ask)
            assert await desk.ask("select 1") == 1
            assert sleepers.running() <= SIZE
        await until(lambda: not sleepers.running(), "every statement has ended")
        await until(lambda: not desk.now.closing, "every connection is closed")
