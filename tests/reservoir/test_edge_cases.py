"""Recreated pools, connects on demand, endpoints, ended event loops, and full clusters."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from tests.reservoir.support import eventually, eventually_async

from moored.leases import connect, sync
from moored.reservoir import (
    AsyncConnectionPool,
    ConnectionPool,
    PoolClosed,
    PoolTimeout,
    ReservoirConfig,
    retry_transaction,
)
from moored.reservoir._core import Core
from moored.reservoir._item import Item
from moored.reservoir._recipe import _endpoint_of


def test_recreated_pools_keep_to_the_rate_of_their_predecessors(module_url: str) -> None:
    born: list[float] = []
    rate = burst = 6
    config = ReservoirConfig(max_size=6, rate=rate, burst=burst, start_stagger=0.0)
    for _ in range(6):
        with ConnectionPool(
            module_url,
            config=config,
            endpoint="made-anew",
            configure=lambda conn: born.append(time.monotonic()),
        ) as pool:
            pool.open(wait=True, timeout=0.1)
        del pool
        gc.collect()
    assert born
    # A window of w seconds may have rate·w + burst; it was three more for each new pool.
    for first, start in enumerate(born):
        for last, end in enumerate(born[first:], first):
            assert last - first + 1 <= rate * (end - start) + burst + 1


@pytest.mark.parametrize("settings", [{"config": ReservoirConfig(enabled=False)}, {"min_size": 0}])
def test_open_with_wait_returns_at_once_if_the_pool_connects_on_demand(
    module_url: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with ConnectionPool(module_url, open=False, max_size=3, **settings) as pool:
        pool.open(wait=True, timeout=600.0)
        assert pool.statistics().refills == 0
        with pool.connection() as conn:
            assert conn.execute("select 1").fetchone() == (1,)
    assert "starting anyway" not in caplog.text


async def test_async_open_with_wait_returns_at_once_if_the_pool_connects_on_demand(
    module_url: str,
) -> None:
    pool: AsyncConnectionPool = AsyncConnectionPool(module_url, min_size=0, max_size=3)
    async with asyncio.timeout(60.0):
        await pool.open(wait=True, timeout=600.0)
    await pool.close()


def test_a_failing_conninfo_function_is_counted_as_a_failed_connect() -> None:
    def where() -> str:
        raise RuntimeError("the vault is sealed")

    with ConnectionPool(where, max_size=1) as pool:
        eventually(lambda: pool.statistics().refill_failures)
        assert set(pool.statistics().refill_failures) == {"connect"}


@pytest.mark.parametrize(
    ("conninfo", "address", "user"),
    [
        ("postgresql://app:secret@db/orders?statement_timeout=5s", "db:5432", "app"),
        ("mysql://app:secret@db:3306/orders", "db:3306", "app"),
        ("mysql://app:secret@db/orders", "db", "app"),
    ],
)
def test_an_endpoint_has_no_password(conninfo: str, address: str, user: str) -> None:
    assert _endpoint_of(conninfo, {}) == (address, user)


@pytest.mark.parametrize(
    ("conninfo", "options", "environment", "address"),
    [
        ("dbname=orders", {}, {"PGHOST": "db", "PGPORT": "6543"}, "db:6543"),
        ("", {}, {"PGHOST": "db", "PGPORT": "6543"}, "db:6543"),
        ("host=other", {}, {"PGHOST": "db", "PGPORT": "6543"}, "other:6543"),
        ("host=other", {"port": 7}, {"PGHOST": "db", "PGPORT": "6543"}, "other:7"),
        ("service=orders", {}, {}, "served:5433"),
        ("service=orders", {"port": 7}, {"PGHOST": "db"}, "served:7"),
        ("", {"service": "orders"}, {"PGPORT": "6543"}, "served:5433"),
        ("service=unknown", {}, {"PGHOST": "db"}, "db:5432"),
        ("", {}, {"PGSERVICE": "orders"}, "served:5433"),
        ("dbname=orders", {}, {}, "localhost:5432"),
    ],
)
def test_an_endpoint_is_the_server_that_libpq_connects_to(
    conninfo: str,
    options: dict[str, Any],
    environment: dict[str, str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    services = tmp_path / "services.conf"
    services.write_text("# ours\n[orders]\nhost=served\nport=5433\n\n[more]\nhost=x\n")
    for name in ("PGHOST", "PGPORT", "PGSERVICE", "PGHOSTADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PGSERVICEFILE": str(services), **environment}.items():
        monkeypatch.setenv(name, value)
    pool: ConnectionPool = ConnectionPool(conninfo, kwargs=options, open=False)
    endpoint = asyncio.run(pool.reservoir.recipe.endpoint())
    assert endpoint.address == address


@pytest.mark.parametrize(
    "conninfo",
    ["DRIVER=x;SERVER=db;PWD=secret", "app:secret@db:port", "http://a:secret@[db", "orders.sqlite"],
)
def test_the_name_of_the_pool_stands_in_for_an_unparsable_endpoint(conninfo: str) -> None:
    pool: ConnectionPool = ConnectionPool(conninfo, name="orders", connect=object, open=False)
    assert asyncio.run(pool.reservoir.recipe.endpoint()) == ("orders", "")


def test_a_full_cluster_is_no_failure_to_reconnect(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[object] = []
    config = ReservoirConfig(max_size=2, lease_limit=3)
    leases = "memory://full-cluster"
    with (
        ConnectionPool(module_url, config=config, leases=leases) as first,
        caplog.at_level(logging.ERROR, "moored.reservoir"),
    ):
        first.wait()
        with ConnectionPool(
            module_url,
            config=config,
            leases=leases,
            reconnect_timeout=0.0,
            reconnect_failed=failed.append,
        ) as second:
            eventually(lambda: second.statistics().refill_failures.get("lease", 0) >= 2)
            eventually(lambda: second.statistics().size == 1)
    assert failed == []
    assert "no connection could be opened" not in caplog.text


def test_a_disabled_reservoir_is_validated_as_an_enabled_one() -> None:
    environ = {"MOORED_RESERVOIR_TARGET_READY": "20"}
    with pytest.raises(ValueError, match="target_ready=20 must be between 0 and max_size=10"):
        ReservoirConfig.from_env(environ=environ)
    assert ReservoirConfig.from_env(environ=environ, max_size=20).target == 0
    with pytest.raises(ValueError, match="low_watermark=11 must be between 0 and target_ready=10"):
        ReservoirConfig(enabled=False, low_watermark=11)


def test_another_driver_s_pool_whose_loop_has_ended_raises_pool_closed() -> None:
    pool = AsyncConnectionPool[Any](connect=object, max_size=1)

    async def use() -> Any:
        async with pool.connection() as conn:
            return conn

    async def take() -> None:
        await pool.getconn()

    asyncio.run(use())
    for again in (use, take):  # the connection is fresh: the first may find it by the fast path
        with pytest.raises(PoolClosed, match="on another event loop, which has ended"):
            asyncio.run(again())
    asyncio.run(pool.close())
    assert pool.closed


async def test_a_lease_client_of_another_loop_is_refused() -> None:
    with sync.connect("memory://") as leases:
        async with AsyncConnectionPool(connect=object, max_size=1, leases=leases) as pool:
            await eventually_async(lambda: pool.reservoir.upkeep.attempts.last_error)
            with pytest.raises(
                PoolTimeout, match="was opened on another event loop than this pool: pass"
            ):
                await pool.getconn(timeout=0.0)
    async with connect("memory://") as client:
        with ConnectionPool(connect=object, max_size=1, leases=client) as threads:
            await eventually_async(lambda: threads.reservoir.upkeep.attempts.last_error)
            with pytest.raises(
                PoolTimeout, match="was opened on another event loop than this pool: pass"
            ):
                threads.getconn(timeout=0.0)


def test_a_connection_held_for_ever_does_not_stop_replacements() -> None:
    """A listener holds one of ten for hours: it was doomed, and nothing else replaced ahead."""
    config = ReservoirConfig(max_size=10, lifetime_jitter=0.0)
    core: Core[object] = Core(config)
    now, births = 0.0, []

    def fill() -> None:
        while core.retired:
            core.retired.pop()
            core.closed()
        while number := core.plan():
            for _ in range(number):
                core.arrived(Item(object(), born=now, lifetime=660.0, guard=45.0), now)
                births.append(now)

    fill()
    assert core.search(now) is not None
    while now < 3600.0:
        core.scan(now, replacing=True)
        fill()
        if now in (1000.0, 1100.0):
            # An outage: all but the one that is held are born together again.
            for item in list(core.ready):
                core.discard(item, "bad")
            fill()
        now += 1.0
    later = [born for born in births if born > 1100.0 + config.usable_lifetime + 10.0]
    assert len(later) > 20
    every = config.usable_lifetime / config.max_size
    assert max(sum(start <= born < start + every for born in later) for start in later) <= 2


def test_retry_transaction_refuses_a_coroutine_function_in_threads(module_url: str) -> None:
    async def work(conn: object) -> None: ...

    refused = pytest.raises(TypeError, match="is a coroutine function")
    with ConnectionPool(module_url, max_size=1) as pool, refused:
        _ = retry_transaction(pool, work)
