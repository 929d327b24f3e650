"""Races: checks that matter only if two events happen in a rare order."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from tests.leases.virtual import in_virtual_time
from tests.reservoir.engines import WAYS, Desk, Way
from tests.reservoir.harness import until
from tests.reservoir.stand_in import Conn, Journal, Server, pool_of, reservoir, wait_until

from moored.leases import connect
from moored.reservoir import AsyncConnectionPool, ConnectionPool, PoolClosed, ReservoirConfig
from moored.reservoir.sqlalchemy import create_engine, reservoir_of
from moored.testing import Sim


@in_virtual_time
async def test_a_connection_whose_lease_is_lost_while_it_is_opened_is_not_kept(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    server.take.append(10.0)
    config = ReservoirConfig(max_size=1, lease_ttl=3.0, lease_enabled=True)
    async with journal.leases() as leases, reservoir(server, config, leases=leases) as water:
        await wait_until(lambda: server.under_way)
        [held] = await leases.held()
        await leases.revoke(held.id, held.key)
        await wait_until(lambda: len(server.times) == 2, 60.0)
        assert water.statistics().discards == {"lease_lost": 1}
        await wait_until(lambda: water.statistics().size)
        assert server.alive == len(await leases.held()) == 1


@in_virtual_time
async def test_the_lease_of_a_connection_that_outlives_its_pool_is_held_until_it_is_closed(
    sim: Sim,
) -> None:
    server = Server()
    url = "memory://outlives"
    config = ReservoirConfig(max_size=2, lease_url=url, lease_limit=2, lease_enabled=True)
    async with connect(url) as others:
        pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
            connect=server.connect, config=config, endpoint="db"
        )
        conn = await pool.getconn()
        await pool.close()
        await asyncio.sleep(600.0)
        assert server.alive == len(await others.held()) == 1
        await pool.putconn(conn)
        await wait_until(lambda: not server.alive)
        await asyncio.sleep(1.0)
        assert await others.held() == []


@pytest.mark.parametrize("after", [0.0, 1.0])
def test_a_close_that_is_cancelled_goes_on_and_the_next_close_waits_for_it(after: float) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        async def close(conn: Conn) -> None:
            await asyncio.sleep(2.0)
            await conn.close()

        server = Server()
        url = "memory://cancelled-close"
        async with connect(url) as others:
            pool = pool_of(server, max_size=3, leases=url, close_connection=close)
            await pool.open(wait=True)
            closing = asyncio.create_task(pool.close())
            await asyncio.sleep(after)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()
            await pool.close()
            assert (server.alive, pool.reservoir.upkeep.budget) == (0, None)
            assert await others.held() == []

    scenario()


@pytest.mark.parametrize("make", [pool_of, reservoir])
def test_an_open_that_is_cancelled_closes_the_pool(make: Any) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        async def use() -> None:
            async with make(server):
                await asyncio.sleep(1000.0)

        server = Server()
        using = asyncio.create_task(use())
        await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait([using])
        assert using.cancelled()
        await asyncio.sleep(60.0)
        assert (server.alive, server.under_way) == (0, 0)

    scenario()


@in_virtual_time
async def test_the_budget_of_a_running_pool_is_kept_when_its_last_connection_is_closed(
    sim: Sim,
) -> None:
    async with reservoir(Server(), ReservoirConfig(max_size=1)) as water:
        await wait_until(lambda: water.statistics().size)
        budget = water.upkeep.budget
        assert budget is not None
        water.discard(water.try_checkout())
        await wait_until(lambda: water.statistics().refills == 2)
        assert water.upkeep.budget is budget


@in_virtual_time
async def test_the_scanner_skips_a_connection_that_was_taken_meanwhile(
    sim: Sim,
) -> None:
    looked: list[object] = []

    def is_broken(conn: object) -> bool:
        looked.append(conn)
        return False

    async with reservoir(Server(), ReservoirConfig(max_size=2), is_broken=is_broken) as water:
        await wait_until(lambda: water.statistics().size == 2)
        await asyncio.sleep(3.0)
        first, second = list(water.core.ready)

        class TakenMeanwhile:
            """The reservoir's lock; a caller takes a connection before it is acquired."""

            entered = 0

            def __enter__(self) -> None:
                self.entered += 1
                if self.entered == 2:
                    assert water.core.pick(first, sim.now)

            def __exit__(self, *_: object) -> None:
                pass

        looked.clear()
        water.upkeep._lock = TakenMeanwhile()  # type: ignore[assignment]
        water.upkeep._find_broken()
        assert looked == [second.conn]
        water.upkeep._lock = water.lock


async def test_a_caller_gets_pool_closed_if_the_pool_is_closed_during_its_check(
    module_url: str,
) -> None:
    async def check(conn: psycopg.AsyncConnection[Any]) -> None:
        await pool.close()
        raise ValueError("not this one")

    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(module_url, max_size=1, check=check)
    with pytest.raises(PoolClosed):
        await pool.getconn(timeout=5.0)


def test_a_thread_gets_pool_closed_if_the_pool_is_closed_before_it_joins_the_queue(
    module_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(now: float, holder: Any) -> None:
        pool.close()

    pool: ConnectionPool[Any]
    with ConnectionPool(module_url, max_size=1) as pool:
        monkeypatch.setattr(pool.reservoir, "obtain", find_nothing)
        with pytest.raises(PoolClosed):
            pool.getconn(timeout=5.0)


def test_a_connection_at_the_address_of_a_former_one_does_not_get_its_record_in_sqlalchemy(
    module_url: str,
) -> None:
    engine = create_engine(module_url, pool_size=2, max_overflow=0)
    with engine.connect() as used:
        [(former, record)] = engine.pool._records.items()  # type: ignore[attr-defined]
        reservoir_of(engine).wait()
        [other] = set(reservoir_of(engine).reservoir.core.items) - {former}
        # As if the used connection had been collected, and the other one had its address.
        engine.pool._records[other] = record  # type: ignore[attr-defined]
        with engine.connect() as second:
            pids = {conn.scalar(text("select pg_backend_pid()")) for conn in (used, second)}
            assert len(pids) == 2
    engine.dispose()


@pytest.mark.parametrize("way", WAYS)
async def test_a_caller_that_waits_while_its_engine_is_disposed_of_gets_a_new_connection(
    way: Way, module_url: str
) -> None:
    async with Desk(way, module_url, pool_size=1, max_overflow=0) as desk:
        held = await desk.take()
        waiting = asyncio.create_task(desk.ask("select 1"))
        await until(lambda: desk.now.waiting, "the second caller waits")
        await desk.dispose()
        assert await waiting == 1
        await held.close()
