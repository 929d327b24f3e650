"""The error table, line by line, and the classes of errors that go with it."""

from __future__ import annotations

import asyncio
import logging

import psycopg
import pytest
from psycopg import errors
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import (
    Conn,
    Journal,
    Server,
    SqlError,
    pool_of,
    reservoir,
    wait_until,
)
from tests.servers import free_port

from moored.reservoir import (
    AsyncConnectionPool,
    CachedTokens,
    PoolTimeout,
    ReservoirConfig,
    ReservoirEmpty,
    retry_transaction,
)
from moored.testing import Sim


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    """What fails on purpose is not worth a line each time."""
    caplog.set_level(logging.CRITICAL, "moored")


# -- line 1: "Reservoir empty" ---------------------------------------------------------------------


@in_virtual_time
async def test_line_1_reservoir_empty_is_raised_at_once_by_try_checkout(sim: Sim) -> None:
    server = Server()
    server.takes = 5.0
    async with reservoir(server) as water:
        await asyncio.sleep(1.0)
        with pytest.raises(ReservoirEmpty, match=r"0 of 1 in use.*1 connect in flight"):
            water.try_checkout()
        assert sim.now == 1.0, "it did not wait"


@in_virtual_time
async def test_line_1_reservoir_empty_queues_callers_of_a_pool(sim: Sim) -> None:
    server = Server()
    server.takes = 5.0
    async with pool_of(server) as pool:
        served: list[int] = []

        async def work(number: int) -> None:
            await asyncio.sleep(number / 10)
            async with pool.connection():
                served.append(number)
                await asyncio.sleep(1.0)

        await asyncio.gather(*map(work, range(4)))
        assert served == [0, 1, 2, 3]
        assert sim.now == pytest.approx(9.0, abs=0.1)


@in_virtual_time
async def test_line_1_reservoir_empty_until_the_callers_timeout(sim: Sim) -> None:
    server = Server()
    server.takes = 20.0
    async with pool_of(server) as pool:
        with pytest.raises(PoolTimeout, match=r"no connection within 3\.0 s: 0 of 1 in use"):
            await pool.getconn(timeout=3.0)
        assert sim.now == 3.0
        assert pool.statistics().in_flight == 1, "the connect goes on for the next one"


# -- line 2: "Connection expired on checkout" ------------------------------------------------------


@in_virtual_time
async def test_line_2_connection_expired_on_checkout_is_discarded(sim: Sim) -> None:
    """Its life ended between two scans; the caller gets the next one that is good."""
    server = Server()
    config = ReservoirConfig(max_size=3, scan_every=10_000.0)
    async with reservoir(server, config) as water:
        await wait_until(lambda: water.statistics().size == 3)
        old, older, good = water.core.ready
        now = water.clock.monotonic()
        old.usable_until = old.fresh_until = now - 1.0
        older.expires = older.usable_until = older.fresh_until = now - 1.0
        assert water.try_checkout() is good.conn
        water.give_back(good.conn)
        await wait_until(lambda: water.statistics().size == 3)
        now_told = water.statistics().discards
        assert dict(now_told) == {"guard_on_checkout": 1, "expired_on_checkout": 1}
        assert (old.conn.closed, older.conn.closed, good.conn.closed) == (True, True, False)


@in_virtual_time
async def test_line_2_connection_expired_on_checkout_and_no_other_is_ready(sim: Sim) -> None:
    server = Server()
    async with reservoir(server, ReservoirConfig(max_size=1, scan_every=10_000.0)) as water:
        await wait_until(lambda: water.statistics().size)
        (item,) = water.core.ready
        item.expires = item.usable_until = item.fresh_until = water.clock.monotonic()
        with pytest.raises(ReservoirEmpty):
            water.try_checkout()
        await wait_until(lambda: water.statistics().size)
        conn = water.try_checkout()
        assert conn is not item.conn
        water.give_back(conn)


# -- line 3: "Connection error during use" ---------------------------------------------------------


@in_virtual_time
async def test_line_3_connection_error_during_use_is_discarded_on_return(sim: Sim) -> None:
    server = Server()
    async with pool_of(server) as pool:
        used: list[Conn] = []

        async def use() -> None:
            async with pool.connection() as conn:
                used.append(conn)
                conn.closed = True  # as a driver does when the server has hung up
                raise OSError("reset by peer")

        with pytest.raises(OSError, match="reset by peer"):
            await use()
        async with pool.connection() as another:
            assert another not in used
        assert dict(pool.statistics().discards) == {"bad": 1}


async def test_line_3_connection_error_during_use_with_a_real_server(postgres_url: str) -> None:
    async with AsyncConnectionPool(postgres_url, max_size=1) as pool:
        with pytest.raises(psycopg.errors.AdminShutdown):
            async with pool.connection() as conn:
                await conn.execute("select pg_terminate_backend(pg_backend_pid())")
        async with pool.connection() as another:
            assert another is not conn
            cursor = await another.execute("select 1")
            assert await cursor.fetchone() == (1,)
        assert dict(pool.statistics().discards) == {"bad": 1}


# -- line 4: "Rate limiter timeout" ----------------------------------------------------------------


@in_virtual_time
async def test_line_4_rate_limiter_timeout_the_refiller_backs_off_and_retries(sim: Sim) -> None:
    server = Server()
    # One at once, the next one after 100 s; a turn is waited for at most 30 s.
    async with pool_of(server, max_size=2, rate=0.01, burst=2) as pool:
        await wait_until(lambda: pool.statistics().refill_failures.get("rate_limit", 0) == 2, 90.0)
        assert 60.0 < sim.now < 70.0
        assert len(server.times) == 1
        async with pool.connection():
            pass  # what there is can be used meanwhile
        await wait_until(lambda: pool.statistics().size == 2, 200.0)
        assert server.times[1] == pytest.approx(100.0, abs=0.01)


# -- line 5: "Lease acquire fails (limit reached)" -------------------------------------------------


@in_virtual_time
async def test_line_5_lease_acquire_fails_the_refiller_backs_off_and_retries(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    config = ReservoirConfig(max_size=2, lease_limit=2)
    async with journal.leases() as leases:
        others = await leases.acquire("connections:db", limit=2)
        assert others is not None
        async with reservoir(server, config, leases=leases) as water:
            await asyncio.sleep(30.0)
            now = water.statistics()
            assert (now.size, set(now.refill_failures)) == (1, {"lease"})
            assert 6 <= now.refill_failures["lease"] <= 12, "at first often, then each 5 to 7.5 s"
            assert journal.lines.count("rate") == 1, "no turn was used up for nothing"
            await others.release()
            await wait_until(lambda: water.statistics().size == 2)


# -- line 6: "DynamoDB unavailable" ----------------------------------------------------------------


@in_virtual_time
async def test_line_6_lease_store_unavailable_falls_back_to_this_process_alone(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    config = ReservoirConfig(max_size=4, rate=2.0, burst=2)
    async with journal.leases() as leases:
        journal.break_down()
        async with reservoir(server, config, leases=leases) as water:
            await wait_until(lambda: water.statistics().size == 4)
            assert (leases.statistics().local, water.statistics().leases_held) == (4, 4)
            assert dict(water.statistics().refill_failures) == {}
            assert server.times[-1] >= 1.0, "and at the rate, of this process alone"


@in_virtual_time
async def test_line_6_lease_store_unavailable_later_keeps_the_connections(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    config = ReservoirConfig(max_size=3)
    async with journal.leases() as leases, reservoir(server, config, leases=leases) as water:
        await wait_until(lambda: water.statistics().size == 3)
        journal.break_down()
        water.discard(water.try_checkout())
        await wait_until(lambda: water.statistics().size == 3)
        assert leases.statistics().local == 1
        journal.error = None
        await wait_until(lambda: leases.statistics().local == 0, 120.0)
        assert water.statistics().size == 3


async def test_line_6_dynamodb_unavailable_with_a_real_client(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    table = f"dynamodb://leases?endpoint_url=http://127.0.0.1:{free_port()}&timeout=0.5"
    config = ReservoirConfig(max_size=2, lease_enabled=True, lease_url=table)
    async with AsyncConnectionPool(postgres_url, config=config) as pool:
        async with pool.connection(timeout=20.0) as conn:
            cursor = await conn.execute("select 1")
            assert await cursor.fetchone() == (1,)
        await pool.wait(20.0)
        assert pool.statistics().leases_held == 2


# -- the classes of errors -------------------------------------------------------------------------


@pytest.mark.parametrize("sqlstate", ["53300", "53400"])
def test_too_many_connections_slow_the_refiller_and_never_reach_waiters(
    sqlstate: str,
) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        server = Server()
        server.script.extend([SqlError(sqlstate)] * 2)
        async with pool_of(server) as pool:
            async with pool.connection(timeout=30.0):
                assert sim.now >= 1.0 + 2.0
            assert pool.statistics().timeouts == 0

    scenario()


@pytest.mark.parametrize("sqlstate", ["28P01", "28000"])
def test_a_refused_token_is_fetched_anew_once(sqlstate: str) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        server = Server()
        server.script.append(SqlError(sqlstate))
        numbers = iter(range(1, 10))

        async def provider() -> str:
            return f"token-{next(numbers)}"

        tokens = CachedTokens(provider)
        async with reservoir(server, tokens=tokens) as water:
            await wait_until(lambda: water.statistics().size)
            assert server.passwords == ["token-1", "token-2"]
            assert (tokens.fetched, tokens.rejected) == (2, 1)

    scenario()


@pytest.mark.parametrize("sqlstate", ["40001", "OC000", "OC001"])
def test_a_conflict_has_a_helper_for_whole_transactions(sqlstate: str) -> None:
    @in_virtual_time
    async def scenario(sim: Sim) -> None:
        tries: list[Conn] = []

        async def work(conn: Conn) -> str:
            tries.append(conn)
            if len(tries) < 3:
                raise SqlError(sqlstate)
            return "done"

        async with pool_of(Server()) as pool:
            assert await retry_transaction(pool, work) == "done"
        assert len(tries) == 3

    scenario()


@pytest.mark.parametrize(
    "error", [errors.FeatureNotSupported("0A000"), errors.ProgramLimitExceeded()]
)
async def test_an_error_other_than_a_conflict_is_raised_at_once(error: Exception) -> None:
    tries: list[Conn] = []

    async def work(conn: Conn) -> None:
        tries.append(conn)
        raise error

    async with pool_of(Server()) as pool:
        with pytest.raises(type(error)):
            await retry_transaction(pool, work)
    assert len(tries) == 1
