"""The direct path is broken in every way: it is noticed, reported as a gap, and heals by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from tests.leases.on_postgres.pgbouncer import pgbouncer
from tests.postgres.clusters import cluster, standby_of
from tests.servers import require_server

from moored.embedded import SyncEmbeddedPostgres
from moored.postgres import Health
from moored.postgres.listen import Gap, Listener, Subscription

from .breaks import (
    LIMIT,
    black_hole,
    flow,
    flow_after_gap,
    flow_until_gap,
    listener_pids,
    next_event,
    run_sql,
    until_down,
)


@pytest.fixture(
    scope="module",
    params=["installed", *(pytest.param(n, marks=pytest.mark.soak) for n in (16, 18))],
)
def server(request: pytest.FixtureRequest) -> Iterator[SyncEmbeddedPostgres]:
    """A server that the tests of this module break: the installed version, and others."""
    if request.param == "installed":
        made = SyncEmbeddedPostgres(bin_dir=Path(require_server("postgres")).parent)
    else:
        made = SyncEmbeddedPostgres(version=request.param)
    with made:
        yield made


@asynccontextmanager
async def listening(
    url: str, heartbeat: float = 5.0
) -> AsyncIterator[tuple[Listener, Subscription]]:
    """A listener, and notifications that flow."""
    async with (
        Listener(url, heartbeat=heartbeat) as listener,
        listener.subscribe("a") as events,
        flow(url),
    ):
        yield listener, events


async def assert_recovers(listener: Listener, events: Subscription, began: float) -> Gap:
    """Nothing is missing before the gap, nor after it; the numbers of a `flow` show it."""
    gap = await flow_until_gap(events)
    assert began - LIMIT < gap.since <= time.time()
    assert listener.up
    await flow_after_gap(events)
    assert listener.statistics()["reconnects"] >= 1
    return gap


async def test_a_terminated_backend(server: SyncEmbeddedPostgres) -> None:
    async with listening(server.url) as (listener, events):
        began = time.time()
        [pid] = await listener_pids(server.url)
        await run_sql(server.url, f"select pg_terminate_backend({pid})")
        gap = await assert_recovers(listener, events, began)
        assert "administrator" in gap.reason


async def test_a_fast_restart(server: SyncEmbeddedPostgres) -> None:
    async with listening(server.url) as (listener, events):
        began = time.time()
        await asyncio.to_thread(server.restart)
        await assert_recovers(listener, events, began)


async def test_a_killed_backend_which_resets_the_server(server: SyncEmbeddedPostgres) -> None:
    async with listening(server.url) as (listener, events):
        began = time.time()
        [pid] = await listener_pids(server.url)
        os.kill(pid, signal.SIGKILL)
        await assert_recovers(listener, events, began)


async def test_an_idle_session_timeout(server: SyncEmbeddedPostgres) -> None:
    url = f"{server.url}?options=-c%20idle_session_timeout%3D500"
    async with Listener(url, heartbeat=60.0) as listener, listener.subscribe("a") as events:
        began = time.time()
        await until_down(listener)
        assert listener._core.failure is not None
        assert "idle-session timeout" in listener._core.failure
        assert isinstance(await next_event(events), Gap)
        assert began <= time.time()


async def test_a_heartbeat_prevents_an_idle_session_timeout(server: SyncEmbeddedPostgres) -> None:
    url = f"{server.url}?options=-c%20idle_session_timeout%3D3000"
    async with Listener(url, heartbeat=0.2) as listener:
        await asyncio.sleep(3.5)
        assert listener.statistics()["reconnects"] == 0


async def test_a_stalled_server_process(server: SyncEmbeddedPostgres) -> None:
    async with listening(server.url, heartbeat=0.5) as (listener, events):
        began = time.time()
        [pid] = await listener_pids(server.url)
        os.kill(pid, signal.SIGSTOP)
        try:
            gap = await assert_recovers(listener, events, began)
            assert "no answer" in gap.reason or "does not answer" in gap.reason
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "heartbeat", [0.5, pytest.param(60.0, marks=pytest.mark.soak)], ids=["heartbeat", "keepalive"]
)
async def test_a_silent_black_hole(server: SyncEmbeddedPostgres, heartbeat: float) -> None:
    async with (
        black_hole(server.url) as hole,
        Listener(hole.url, heartbeat=heartbeat) as listener,
        listener.subscribe("a") as events,
        # A flow would be in flight at the cut, and not idle.
        contextlib.AsyncExitStack() as stack,
    ):
        await run_sql(server.url, "notify a, '0/0'")
        assert (await next_event(events))[:2] == ("a", "0/0")
        began = time.time()
        hole.cut()
        await until_down(listener)
        assert listener.health is Health.DEGRADED
        # Queries by another path are not affected, and neither is the loop.
        await run_sql(server.url, "notify a, 'lost'")
        hole.heal()
        await stack.enter_async_context(flow(server.url))
        await assert_recovers(listener, events, began)


async def test_a_subscription_during_a_black_hole_does_not_hang(
    server: SyncEmbeddedPostgres,
) -> None:
    async with black_hole(server.url) as hole, Listener(hole.url) as listener:
        hole.cut()
        async with asyncio.timeout(LIMIT), listener.subscribe("a") as events:
            assert not listener.up
            hole.heal()
            assert isinstance(await next_event(events), Gap)


async def test_a_standby_is_refused_and_its_promotion_is_noticed() -> None:
    async with cluster() as primary, standby_of(primary) as standby:  # noqa: SIM117
        async with Listener(standby.url) as listener, listener.subscribe("a") as events:
            assert not listener.up
            assert "read-only" in listener.explain()
            await standby.promote()
            assert isinstance(await next_event(events), Gap)
            await run_sql(standby.url, "notify a, 'x'")
            assert (await next_event(events))[:2] == ("a", "x")


async def test_queries_work_while_the_direct_path_is_down(server: SyncEmbeddedPostgres) -> None:
    with pgbouncer(require_server("pgbouncer"), server.url) as url:
        async with (
            black_hole(server.url) as hole,
            Listener(hole.url, notify_through=url, heartbeat=0.5) as listener,
        ):
            hole.cut()
            await until_down(listener)
            async with await psycopg.AsyncConnection.connect(url, prepare_threshold=None) as conn:
                assert await (await conn.execute("select 1")).fetchone() == (1,)
            await listener.notify("a", "sent")


@pytest.mark.soak
async def test_sixty_seconds_of_downtime(server: SyncEmbeddedPostgres) -> None:
    async with listening(server.url) as (listener, events):
        began = time.time()
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(60.0)
        assert listener.statistics()["failed_series"] >= 2
        await asyncio.to_thread(server.start)
        await assert_recovers(listener, events, began)
