"""SQLAlchemy's engines with lost connections, and with a server that limits connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, exc, make_url
from sqlalchemy.exc import DBAPIError
from tests.reservoir.engines import WAYS, Desk, SteppedClock, Way, terminate, unseen
from tests.reservoir.harness import LIMIT, Gate, until

from moored.reservoir import PoolTimeout, ReservoirConfig
from moored.reservoir.sqlalchemy import EngineTimeout
from moored.testing import scaled
from moored.testing.proxy import postgres_fatal


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def gate(postgres_url: str) -> AsyncIterator[Gate]:
    server = make_url(postgres_url)
    assert server.host is not None
    assert server.port is not None
    async with Gate(server.host, server.port) as gate:
        yield gate


@pytest.fixture
def gated_url(gate: Gate, postgres_url: str) -> str:
    through = make_url(postgres_url).set(host=gate.host, port=gate.port)
    return through.render_as_string(hide_password=False)


def plainly(way: Way) -> dict[str, Any]:
    """To ask for no encryption, so that one connect is one connection."""
    if way == "asyncpg":
        return {"connect_args": {"ssl": False}}
    return {"connect_args": {"sslmode": "disable", "gssencmode": "disable"}}


# -- what breaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_pre_ping", [False, True])
async def test_an_idle_connection_that_the_server_closed_is_not_handed_out(
    way: Way, postgres_url: str, clock: SteppedClock, pool_pre_ping: bool
) -> None:
    async with Desk(
        way, postgres_url, config=unseen(max_size=2), clock=clock, pool_pre_ping=pool_pre_ping
    ) as desk:
        held = await desk.take_all(2)
        pids = [await one.ask() for one in held]
        for one in held:
            await one.close()
        # The loop stands still meanwhile: no driver can have read the server's farewell.
        terminate(postgres_url, pids[0])
        clock.ahead += 1.0
        held = await desk.take_all(2)
        found = [await one.ask() for one in held]
        # Only the one that was lost was replaced.
        assert pids[1] in found
        assert pids[0] not in found
        assert desk.now.discards == {"bad": 1}
        for one in held:
            await one.close()


async def test_the_scanner_finds_connections_that_the_server_closed(
    way: Way, postgres_url: str
) -> None:
    config = ReservoirConfig(max_size=1, scan_every=0.05)
    async with Desk(way, postgres_url, config=config) as desk:
        first = await desk.ask()
        await asyncio.to_thread(terminate, postgres_url, first)
        await until(lambda: desk.now.discards == {"bad": 1}, "it was found")
        await until(lambda: desk.now.size == 1, "and replaced, before anybody asks")
        assert await desk.ask() != first


async def test_a_connection_that_the_server_closes_in_use_is_replaced(
    way: Way, gate: Gate, gated_url: str
) -> None:
    async with Desk(way, gated_url, config=unseen(max_size=2)) as desk:
        lost, kept = await desk.take_all(2)
        pids = [await lost.ask(), await kept.ask()]
        await kept.close()
        await asyncio.to_thread(terminate, gated_url, pids[0])
        with pytest.raises(DBAPIError) as caught:
            await lost.ask()
        assert caught.value.connection_invalidated
        await lost.close()
        await until(lambda: desk.now.discards, "a connection was closed")
        # SQLAlchemy's own pool would replace all; here each is pinged, and kept if it answers.
        held = await desk.take_all(2)
        assert pids[1] in [await each.ask() for each in held]
        for each in held:
            await each.close()
        assert desk.now.discards == {"bad": 1}


async def test_a_rollback_to_a_server_that_vanished_ends_in_time(
    way: Way, gate: Gate, gated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.reservoir.sqlalchemy.PING_TIMEOUT", 0.2)
    monkeypatch.setattr("moored.reservoir._upkeep.CLOSE_PATIENCE", 0.2)
    async with Desk(way, gated_url, config=unseen(max_size=1), **plainly(way)) as desk:
        held = await desk.take()
        await held.ask()
        gate.black_hole()
        try:
            # Without a limit it would take as long as TCP tries.
            async with asyncio.timeout(LIMIT):
                with pytest.raises(DBAPIError) as caught:
                    await held.roll_back()
        finally:
            gate.resume()
        assert caught.value.connection_invalidated
        await held.close()
        await until(lambda: desk.now.discards == {"bad": 1}, "a connection was closed")


async def test_an_invalidated_connection_is_not_kept(way: Way, postgres_url: str) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:
        held = await desk.take()
        first = await held.ask()
        if isinstance(held.conn, Connection):
            held.conn.rollback()
            held.conn.invalidate()
        else:
            await held.conn.rollback()
            await held.conn.invalidate()
        await held.close()
        assert await desk.ask() != first
        assert desk.now.discards == {"bad": 1}


async def test_an_open_transaction_is_rolled_back_without_reset_on_return(
    way: Way, postgres_url: str
) -> None:
    """With `pool_reset_on_return=None` a connection can come back in a transaction. SQLAlchemy's
    own pool hands it out as it is; the reservoir ends the transaction, and keeps the connection."""
    one = {"pool_size": 1, "max_overflow": 0}
    async with Desk(way, postgres_url, pool_reset_on_return=None, **one) as desk:
        held = await desk.take()
        pid = await held.ask()
        if isinstance(held.conn, Connection):
            held.conn.connection.close()
        else:
            raw = await held.conn.get_raw_connection()
            await held.conn.run_sync(lambda conn: raw.close())
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            state = "select state from pg_stat_activity where pid = %s"
            assert admin.execute(state, [pid]).fetchone() == ("idle",)
        assert await desk.ask() == pid
        assert desk.now.discards == {}


@pytest.mark.parametrize("way", ["psycopg", "asyncpg"])
async def test_a_connection_whose_query_was_cancelled_is_replaced(
    way: Way, postgres_url: str
) -> None:
    async with Desk(way, postgres_url, pool_size=1, max_overflow=0) as desk:
        held = await desk.take()
        pid = await held.ask()
        sleeping = asyncio.create_task(held.ask("select pg_sleep(60)"))
        busy = f"select count(*) from pg_stat_activity where pid = {pid} and state = 'active'"
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            await until(lambda: admin.execute(busy).fetchall() == [(1,)], "it sleeps")
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        await held.close()
        assert await desk.ask() != pid
        assert desk.now.discards == {"bad": 1}


async def test_a_connection_idle_for_long_is_pinged(
    way: Way, gate: Gate, gated_url: str, clock: SteppedClock
) -> None:
    config = unseen(max_size=1)
    async with Desk(way, gated_url, config=config, clock=clock, check_idle=30.0) as desk:
        first = await desk.ask()
        clock.ahead += 29.0
        before = gate.statistics().bytes_up
        held = await desk.take()
        assert gate.statistics().bytes_up == before
        await held.close()
        clock.ahead += 31.0
        held = await desk.take()
        assert gate.statistics().bytes_up > before
        assert await held.ask() == first
        await held.close()


# -- a server that limits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    ["threads", *(pytest.param(each, marks=pytest.mark.soak) for each in ("psycopg", "asyncpg"))],
)
async def test_the_servers_rate_is_kept(way: Way, gate: Gate, gated_url: str) -> None:
    """With very short lifetimes under constant load, no caller is refused."""
    gate.limit(20, 6, answer=postgres_fatal())
    config = ReservoirConfig(
        max_size=6,
        base_lifetime=1.0,
        lifetime_jitter=0.0,
        guard_window=0.2,
        scan_every=0.05,
        rate=15.0,
        burst=4,
    )
    births = scaled(60, least=15)
    async with Desk(way, gated_url, config=config, **plainly(way)) as desk:

        async def work() -> int:
            calls = 0
            while desk.now.refills < births:
                assert await desk.ask("select 1 from pg_sleep(0.02)") == 1
                calls += 1
            return calls

        async with asyncio.timeout(60):
            assert min(await asyncio.gather(*(work() for _ in range(4)))) > 0
        assert gate.statistics().limited == 0
        assert desk.now.refill_failures == {}
        assert sum(desk.now.discards.values()) >= births - 6
    assert gate.excess(rate=15.0, burst=4) is None


async def test_an_unexpected_limit_of_the_server_makes_callers_wait(
    way: Way, gate: Gate, gated_url: str
) -> None:
    gate.limit(2, 1, answer=postgres_fatal())
    async with Desk(way, gated_url, pool_size=4, max_overflow=0, **plainly(way)) as desk:
        asked = [desk.ask("select 1") for _ in range(12)]
        assert await asyncio.gather(*asked) == [1] * 12
        # They share what there is, so they need not wait for the rest.
        await until(lambda: gate.statistics().limited, "the server has refused")
        await until(lambda: desk.now.refill_failures, "which is known")
        assert set(desk.now.refill_failures) == {"connect"}


async def test_a_waiter_gets_a_returned_connection(way: Way, gate: Gate, gated_url: str) -> None:
    gate.limit(0, 1)
    async with Desk(way, gated_url, pool_size=2, max_overflow=0, **plainly(way)) as desk:
        held = await desk.take()
        pid = await held.ask()
        waiting = asyncio.create_task(desk.take())
        await until(lambda: desk.now.waiting == 1, "a caller waits")
        await held.close()
        # There will be no other.
        async with asyncio.timeout(10):
            served = await waiting
        assert await served.ask() == pid
        await served.close()


async def test_a_caller_waits_no_longer_than_pool_timeout(
    way: Way, gate: Gate, gated_url: str
) -> None:
    async with Desk(way, gated_url, pool_size=1, max_overflow=0, pool_timeout=0.2) as desk:
        await desk.fill()
        held = await desk.take()
        began = time.monotonic()
        with pytest.raises(EngineTimeout, match=r"no connection within 0.2 s: 1 of 1 in") as caught:
            await desk.take()
        assert time.monotonic() - began >= 0.2
        # The error is both a pool's and SQLAlchemy's.
        assert isinstance(caught.value, PoolTimeout)
        assert isinstance(caught.value, exc.TimeoutError)
        await held.close()
        assert await desk.ask("select 1") == 1
