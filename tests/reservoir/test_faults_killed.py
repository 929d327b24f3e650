"""The database is killed, or leases are lost: waiters are served, and no call hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.leases.redis_server import RedisServer
from tests.reservoir.fleet import Census
from tests.reservoir.harness import LIMIT, SHELLS, Load, Rig, Shell, lost, until
from tests.servers import require_server

from moored import leases
from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import PoolTimeout, ReservoirConfig
from moored.testing import scaled

SIZE = 4
#: Seconds that the server is away.
OUTAGE = scaled(10, least=1)
#: A lease is renewed every third of this. A busy machine may stop everything for a second or two,
#: and only the lease that was revoked may be lost.
TTL = 9.0


two_shells = pytest.mark.parametrize("shell", SHELLS)


@pytest.fixture(scope="module")
def server() -> Iterator[SyncEmbeddedPostgres]:
    """A server that a test may kill; it has its port for good."""
    with SyncEmbeddedPostgres() as running:
        yield running


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as running:
        yield running


async def kill(server: SyncEmbeddedPostgres) -> None:
    """End the postmaster by SIGKILL, and return when it is gone."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.to_thread(server.wait_ended)


@pytest.mark.parametrize("shell", [*SHELLS, pytest.param("asyncpg", marks=pytest.mark.soak)])
async def test_a_pool_under_load_survives_a_kill_of_the_database(
    shell: Shell, server: SyncEmbeddedPostgres
) -> None:
    async with Rig(shell, server.url, max_size=SIZE) as rig, Load(rig, 8, timeout=60.0) as load:
        await rig.full()
        await load.served_more(20)
        busy = await rig.take()
        query = asyncio.create_task(rig.execute(busy, "select pg_sleep(600)"))
        await load.served_more(20)
        await kill(server)
        began = time.monotonic()
        done, _ = await asyncio.wait([query], timeout=LIMIT)
        assert done
        assert lost(query.exception())
        await rig.give(busy)
        await until(lambda: rig.live == 0, "all that were lost are known")
        late = [asyncio.create_task(rig.ask(timeout=60.0)) for _ in range(SIZE)]
        with pytest.raises(PoolTimeout):
            await rig.ask(timeout=0.05)
        await until(lambda: time.monotonic() >= began + OUTAGE, "the outage is over", limit=60.0)
        seen = len(load.errors)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(LIMIT):
            assert await asyncio.gather(*late) == [1] * SIZE
        await rig.full(births=2 * SIZE)
        await load.served_more(50)
        # One error for each connection that was in use, and none for those who waited.
        assert seen == len(load.errors) <= SIZE
        assert [error for error in load.errors if not lost(error)] == []


@two_shells
async def test_an_idle_pool_survives_a_kill_of_the_database(
    shell: Shell, server: SyncEmbeddedPostgres
) -> None:
    async with Rig(shell, server.url, max_size=SIZE) as rig:
        await rig.full()
        await kill(server)
        await until(lambda: rig.now.refill_failures, "it was found out")
        await asyncio.to_thread(server.start)
        await rig.full(births=2 * SIZE)
        assert await asyncio.gather(*(rig.ask() for _ in range(2 * SIZE))) == [1] * 2 * SIZE
        assert rig.now.discards == {"bad": SIZE}


# -- leases that are lost --------------------------------------------------------------------------


def leased(store: RedisServer, url: str, name: str) -> dict[str, Any]:
    """The settings of a pool that holds all leases that there are."""
    config = ReservoirConfig(
        max_size=SIZE,
        lease_enabled=True,
        lease_url=f"{store.url}?prefix={name}",
        lease_limit=SIZE,
        lease_ttl=TTL,
    )
    return {
        "conninfo": url,
        "config": config,
        "kwargs": {"autocommit": True, "application_name": name},
    }


async def revoke(rig: Rig) -> None:
    """End one of the pool's leases, as an administrator does."""
    url = rig.pool.config.lease_url
    assert url is not None
    async with leases.connect(url) as other:
        held = await other.held()
        assert len(held) == SIZE
        assert await other.revoke(held[0].id, held[0].key)


@two_shells
async def test_an_idle_connection_is_closed_when_its_lease_is_lost(
    shell: Shell, store: RedisServer, postgres: SyncEmbeddedPostgres
) -> None:
    name = f"idle-{shell}"
    with Census(postgres.url, name).running() as census:
        async with Rig(shell, **leased(store, postgres.url, name)) as rig:
            await rig.full()
            await revoke(rig)
            # The connection is closed and replaced without any caller.
            await rig.full(births=SIZE + 1)
            assert rig.now.discards == {"lease_lost": 1}
            assert rig.now.leases_held == SIZE
            assert await rig.ask() == 1
            await until(lambda: len(census.seen) == SIZE + 1, "the server has seen the new one")
        await until(lambda: not census.present, "all are gone")
    assert census.most == SIZE


@two_shells
async def test_a_connection_in_use_whose_lease_is_lost_is_closed_at_the_return(
    shell: Shell, store: RedisServer, postgres: SyncEmbeddedPostgres
) -> None:
    name = f"used-{shell}"
    with Census(postgres.url, name).running() as census:
        async with Rig(shell, **leased(store, postgres.url, name)) as rig:
            await rig.full()
            taken = [await rig.take() for _ in range(SIZE)]
            await revoke(rig)
            recorded = rig.pool.recorder.events
            await until(lambda: any("lost its lease" in e.text for e in recorded()), "it is known")
            # Its holder continues, and no other connection is opened in its place.
            assert [await rig.execute(conn, "select 1") for conn in taken] == [1] * SIZE
            with pytest.raises(PoolTimeout):
                await rig.ask(timeout=0.2)
            assert rig.now.discards == {}
            await rig.give(*taken)
            await rig.full(births=SIZE + 1)
            assert rig.now.discards == {"lease_lost": 1}
            assert rig.now.leases_held == SIZE
            await until(lambda: len(census.seen) == SIZE + 1, "the server has seen the new one")
    assert census.most == SIZE
