"""The reservoir with a real server and a real lease store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from tests.leases.redis_server import RedisServer
from tests.reservoir.fleet import Census, Fleet
from tests.reservoir.harness import LIMIT, SHELLS, Gate, Load, Rig, Shell, until
from tests.servers import require_server

from moored import leases
from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import Reservoir, ReservoirConfig, ReservoirEmpty
from moored.testing import scaled

#: How much later than its turn under the rate a connect may reach the server, on a machine that
#: does other things too: what had turns in this time may arrive together.
LATE = 0.4


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def gate(postgres: SyncEmbeddedPostgres) -> Iterator[Gate]:
    with Gate("127.0.0.1", postgres.port).in_thread() as running:
        yield running


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(require_server("redis")) as running:
        yield running


# -- 1: end to end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", ["true", "false"])
async def test_a_pool_configured_by_the_environment_works_end_to_end(
    shell: Shell, postgres: SyncEmbeddedPostgres, postgres_url: str, enabled: str
) -> None:
    name = f"service-{shell}-{enabled}"
    environ = {"MOORED_RESERVOIR_ENABLED": enabled, "MOORED_RESERVOIR_BASE_LIFETIME": "2m"}
    config = ReservoirConfig.from_env(environ=environ, max_size=4)
    options = {"application_name": name}
    with psycopg.connect(postgres_url) as admin:
        admin.execute("create table log (n int)")
    with Census(postgres.url, name).running() as census:
        async with Rig(shell, postgres_url, config=config, kwargs=options) as rig:
            await rig.full()
            assert rig.live == (4 if enabled == "true" else 0)
            rows = [rig.ask(f"insert into log values ({n}) returning n") for n in range(20)]
            assert await asyncio.gather(*rows) == list(range(20))
            with pytest.raises(psycopg.errors.DivisionByZero):
                await rig.ask("insert into log values (99) returning n / 0")
            assert await rig.ask("select count(*) from log") == 20
            assert rig.now.checkouts == 22
            assert rig.now.in_use == 0
            await until(lambda: census.most, "the observer has counted")
        await until(lambda: not census.present, "all connections are closed")
    assert census.most <= 4


# -- 2: empty reservoir recovery -------------------------------------------------------------------


@asynccontextmanager
async def opened(shell: Shell, url: str, size: int) -> AsyncIterator[Reservoir[Any]]:
    reservoir: Reservoir[Any] = Reservoir(
        url, config=ReservoirConfig(max_size=size), asynchronous=shell == "asyncio"
    )
    if shell == "asyncio":
        async with reservoir:
            yield reservoir
    else:
        await asyncio.to_thread(reservoir.__enter__)
        yield reservoir
        await asyncio.to_thread(reservoir.__exit__, None, None, None)


async def test_an_empty_reservoir_recovers(shell: Shell, postgres: SyncEmbeddedPostgres) -> None:
    async with opened(shell, postgres.url, 5) as reservoir:
        for number in range(1, scaled(30, least=3) + 1):
            await until(lambda: reservoir.statistics().size == 5, "it is full")
            taken = [reservoir.try_checkout() for _ in range(5)]
            with pytest.raises(ReservoirEmpty, match="5 of 5 in use"):
                reservoir.try_checkout()
            # What is in use counts: nothing is opened for it, so nothing is in excess later.
            assert reservoir.statistics().refills == 5 * number
            for conn in taken:
                reservoir.give_back(conn, bad=True)
        assert reservoir.statistics().discards == {"bad": 5 * number}


# -- 3: rate limit compliance ----------------------------------------------------------------------


async def test_connects_keep_to_the_rate_over_restarts_of_the_refiller(
    shell: Shell, postgres: SyncEmbeddedPostgres, gate: Gate
) -> None:
    rate, burst, rounds = 20.0, 6, scaled(50, least=5)
    config = ReservoirConfig(max_size=6, rate=rate, burst=burst)
    async with Rig(shell, gate.url(postgres.url), config=config) as rig:
        for number in range(1, rounds + 1):
            # In the middle of the filling: what it began goes on, and no turn is given anew.
            await rig.born(6 * number - 3)
            await rig.restart_refiller()
            await rig.full(births=6 * number)
            await rig.drain()
        await rig.full(births=6 * (rounds + 1))
        assert rig.now.refill_failures == {}
    assert len(gate.arrivals) == 6 * (rounds + 1)
    assert gate.excess(rate=rate, burst=burst + round(rate * LATE)) is None


async def test_all_pools_of_a_process_keep_to_one_rate(
    postgres: SyncEmbeddedPostgres, gate: Gate
) -> None:
    rate, burst = 20.0, 6
    config = ReservoirConfig(max_size=10, rate=rate, burst=burst)
    url = gate.url(postgres.url)
    async with Rig("asyncio", url, config=config) as one, Rig("threads", url, config=config) as two:
        await asyncio.gather(one.full(), two.full())
    assert len(gate.arrivals) == 20
    assert gate.excess(rate=rate, burst=burst + round(rate * LATE)) is None


# -- 4: global limit -------------------------------------------------------------------------------


@pytest.fixture(params=["redis", pytest.param("postgres", marks=pytest.mark.soak)])
def store_url(request: pytest.FixtureRequest, redis: RedisServer, postgres_url: str) -> str:
    return f"{redis.url}?prefix={time.time_ns()}" if request.param == "redis" else postgres_url


async def test_three_processes_share_a_limit_and_outlive_one(
    store_url: str, postgres: SyncEmbeddedPostgres, gate: Gate
) -> None:
    limit, ttl, rate, burst = 6, 4.5, 20.0, 6
    shells: tuple[Shell, ...] = ("asyncio", "threads", "asyncio")
    config = {
        "max_size": 4,
        "base_lifetime": 1.2,
        "lifetime_jitter": 0.2,
        "guard_window": 0.2,
        "rate": rate,
        "burst": burst,
        "lease_enabled": True,
        "lease_url": store_url,
        "lease_limit": limit,
        "lease_ttl": ttl,
    }
    names = ("fleet-1", "fleet-2", "fleet-3")
    orders = {
        name: {
            "shell": kind,
            "conninfo": gate.url(postgres.url, application_name=name),
            "callers": 6,
            "config": config,
        }
        for name, kind in zip(names, shells, strict=True)
    }
    counted = Census(postgres.url, "fleet", settled=0.5)
    with counted.running() as census, Fleet(orders) as fleet:
        await until(lambda: len(census.present) == limit, "the limit is reached")
        born = len(census.seen) + limit * scaled(20, least=1)
        await until(lambda: len(census.seen) >= born, "leases change hands", limit=120.0)
        await until(lambda: len(census.present) == limit, "the limit is reached again")
        crashed = max(names, key=census.of)
        assert census.of(crashed) >= 2
        fleet.kill(crashed)
        killed = time.monotonic()
        await until(lambda: not census.of(crashed), "the server has noticed")
        await until(lambda: len(census.present) == limit, "the others have what it had")
        # Its leases were renewed a third of the ttl before, at the latest.
        assert time.monotonic() - killed > ttl / 2
        assert census.most <= limit
    assert gate.excess(rate=rate, burst=burst + round(rate * LATE)) is None


# -- the lease store is away ---------------------------------------------------------------------


async def test_without_its_lease_store_a_pool_uses_local_leases_and_logs_it(
    shell: Shell, postgres: SyncEmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="moored.leases")
    with RedisServer(require_server("redis")) as store:
        config = ReservoirConfig(
            max_size=4, lease_enabled=True, lease_url=store.url, lease_limit=4, lease_ttl=3.0
        )
        async with Rig(shell, postgres.url, config=config) as rig, Load(rig, 6) as load:
            await rig.full()
            store.kill()
            before = rig.now
            # Its leases cannot be renewed: this process keeps them alone, and its connections.
            await until(lambda: "kept as local leases" in caplog.text, "a lease has expired")
            await load.served_more(20)
            assert "applying limits within this process only" in caplog.text
            store.start()
            await until(lambda: "answers again" in caplog.text, "it was found again")
            async with leases.connect(store.url) as other:
                async with asyncio.timeout(LIMIT):
                    while len(await other.held()) != 4:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.01)
            await load.served_more(20)
            assert rig.live == 4
            assert (rig.now.refills, rig.now.discards) == (before.refills, before.discards)
        assert load.errors == []


async def test_a_pool_starts_without_its_lease_store(
    shell: Shell, postgres: SyncEmbeddedPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    store = RedisServer(require_server("redis"))
    config = ReservoirConfig(
        max_size=4, lease_enabled=True, lease_url=store.url, lease_limit=4, lease_ttl=9.0
    )
    try:
        async with Rig(shell, postgres.url, config=config) as rig:
            await rig.full()
            assert "applying limits within this process only" in caplog.text
            assert await rig.ask() == 1
    finally:
        store.stop()
