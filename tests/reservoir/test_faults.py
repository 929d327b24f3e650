"""Drained, expired, reset and refused connections: callers that can wait do not notice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.reservoir.fleet import Census
from tests.reservoir.harness import (
    DRIVERS,
    LIMIT,
    SHELLS,
    Gate,
    Load,
    Rig,
    Shell,
    lost,
    until,
)

from moored.embedded import SyncEmbeddedPostgres
from moored.reservoir import (
    AsyncConnectionPool,
    CachedTokens,
    ConnectionPool,
    PoolTimeout,
    ReservoirConfig,
)
from moored.testing import scaled
from moored.testing.proxy import postgres_fatal

_numbers = itertools.count(1)


@pytest.fixture(params=DRIVERS)
def shell(request: pytest.FixtureRequest) -> Any:
    return request.param


two_shells = pytest.mark.parametrize("shell", SHELLS)
#: For many connections under load: one of them in `make test`.
one_of_two_shells = pytest.mark.parametrize(
    "shell", ["threads", pytest.param("asyncio", marks=pytest.mark.soak)]
)
one_of_all = pytest.mark.parametrize(
    "shell",
    ["asyncio", *(pytest.param(each, marks=pytest.mark.soak) for each in ("threads", "asyncpg"))],
)


@pytest.fixture
def gate(postgres: SyncEmbeddedPostgres) -> Iterator[Gate]:
    with Gate("127.0.0.1", postgres.port).in_thread() as running:
        yield running


@pytest.fixture
def url(gate: Gate, postgres: SyncEmbeddedPostgres) -> str:
    return gate.url(postgres.url)


# -- connections come and go under load ------------------------------------------------------------


@one_of_two_shells
async def test_drained_under_load_it_recovers_without_an_error(
    shell: Shell, postgres: SyncEmbeddedPostgres, gate: Gate, url: str
) -> None:
    name, rounds = f"drained-{shell}", scaled(30, least=3)
    with Census(postgres.url, name).running() as census:
        async with Rig(shell, f"{url}?application_name={name}", max_size=6) as rig:
            async with Load(rig, 10) as load:
                for number in range(1, rounds + 1):
                    await rig.full(births=6 * number)
                    await load.served_more(20)
                    await rig.drain()
                await rig.full(births=6 * (rounds + 1))
                await load.served_more(20)
            assert load.errors == []
            assert rig.now.discards == {"drained": 6 * rounds}
    assert len(gate.arrivals) == 6 * (rounds + 1)
    assert census.most == 6


@one_of_two_shells
async def test_callers_do_not_notice_the_expiry_of_all_connections(
    shell: Shell, gate: Gate, url: str
) -> None:
    size, rate, burst = 12, 20.0, 4
    config = ReservoirConfig(
        max_size=size,
        base_lifetime=1.1,
        lifetime_jitter=0.1,
        guard_window=0.2,
        rate=rate,
        burst=burst,
    )
    # The way from a turn under the rate to the server takes a moment that differs from one connect
    # to the next: a quarter of a second, for a machine that does other things too. All of them at
    # once would still be too many.
    allowed = burst + round(rate * 0.25)
    assert allowed < size
    gate.limit(rate, allowed, answer=postgres_fatal("53400"))
    async with Rig(shell, url, config=config) as rig:
        await rig.full()
        async with Load(rig, 16) as load:
            await rig.born(size * (1 + scaled(10, least=1)), limit=120.0)
        assert load.errors == []
        assert gate.statistics().limited == 0
        assert rig.now.refill_failures == {}


@one_of_all
async def test_a_token_that_expires_under_load_is_replaced(
    shell: Shell, postgres: SyncEmbeddedPostgres, gate: Gate
) -> None:
    role = f"token_{next(_numbers)}_{shell}"
    tokens = CachedTokens(lambda: passwords[-1])
    passwords = ["first"]
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(f"create role {role} login password 'first'".encode())
        url = gate.url(postgres.url, login=role)
        async with (
            Rig(shell, url, max_size=4, tokens=tokens) as rig,
            Load(rig, 6) as load,
        ):
            await rig.full()
            before = await _backends_of(rig, 4)
            admin.execute(f"alter role {role} password 'second'".encode())
            passwords.append("second")
            # Those that are open live on, and the new ones learn of the new token by being refused.
            await rig.resize(8)
            await rig.full()
            assert await _backends_of(rig, 8) > before
            assert (tokens.fetched, tokens.rejected) == (2, 1)
            await rig.drain()
            await rig.full(births=16)
            await load.served_more(20)
        assert load.errors == []
        assert rig.now.refill_failures == {}
        assert (tokens.fetched, tokens.rejected) == (2, 1)
        admin.execute(f"drop role {role}".encode())


async def _backends_of(rig: Rig, number: int) -> set[int]:
    """The server's processes of all connections of a pool."""
    taken = [await rig.take() for _ in range(number)]
    pids = {rig.backend(conn) for conn in taken}
    await rig.give(*taken)
    assert len(pids) == number
    return pids


# -- the way to the server -----------------------------------------------------------------------


@one_of_all
async def test_a_reset_of_all_costs_each_connection_one_error_at_most(
    shell: Shell, gate: Gate, url: str
) -> None:
    async with Rig(shell, url, max_size=6) as rig, Load(rig, 10) as load:
        await rig.full()
        for number in range(1, scaled(20, least=2) + 1):
            await load.served_more(20)
            assert gate.reset() >= 6
            await rig.full(births=6 * (number + 1))
            await load.served_more(20)
            # Who has one in use, or gets one that was in use a moment ago, sees the driver's error.
            assert len(load.errors) <= 6 * number
        assert [error for error in load.errors if not lost(error)] == []


async def test_callers_do_not_notice_a_reset_of_idle_connections(
    shell: Shell, gate: Gate, url: str
) -> None:
    async with Rig(shell, url, max_size=6) as rig:
        await rig.full()
        await _let_them_be_idle(rig)
        await gate.cut()
        assert await asyncio.gather(*(rig.ask() for _ in range(12))) == [1] * 12
        assert rig.now.discards == {"bad": 6}


async def _let_them_be_idle(rig: Rig) -> None:
    """For longer than a connection is handed out without a look at it."""
    ready = rig.pool.reservoir.core.ready
    await until(
        lambda: all(time.monotonic() >= item.fresh_until for item in list(ready)), "all are idle"
    )


@two_shells
async def test_a_pool_recovers_when_connects_are_no_longer_refused(
    shell: Shell, gate: Gate, url: str
) -> None:
    async with Rig(shell, url, max_size=4) as rig:
        await rig.full()
        await _let_them_be_idle(rig)
        gate.refuse()
        await gate.cut()
        callers = [asyncio.create_task(rig.ask()) for _ in range(8)]
        await until(lambda: rig.now.refill_failures.get("connect", 0) >= 2, "it was refused twice")
        with pytest.raises(PoolTimeout, match=r"connecting has failed for .*[Cc]onnection refused"):
            await rig.ask(timeout=0.05)
        gate.refuse(False)
        async with asyncio.timeout(LIMIT):
            assert await asyncio.gather(*callers) == [1] * 8
        await rig.full()


@two_shells
async def test_stalled_connects_time_out_and_are_retried(
    shell: Shell, gate: Gate, url: str
) -> None:
    config = ReservoirConfig(max_size=4, connect_timeout=0.5)
    gate.stall()
    async with Rig(shell, url, config=config) as rig:
        callers = [asyncio.create_task(rig.ask()) for _ in range(8)]
        await until(lambda: rig.now.refill_failures.get("connect", 0) >= 1, "one has given up")
        assert rig.now.in_flight <= 4
        gate.resume()
        async with asyncio.timeout(LIMIT):
            assert await asyncio.gather(*callers) == [1] * 8
        await rig.full()
        assert rig.now.timeouts == 0


@pytest.mark.parametrize(
    ("shell", "code"), [("asyncio", "53300"), *((one, "53400") for one in DRIVERS)]
)
async def test_too_many_connections_makes_the_refiller_back_off(
    shell: Shell, gate: Gate, url: str, code: str
) -> None:
    gate.limit(0, 0, answer=postgres_fatal(code))
    began = time.monotonic()
    async with Rig(shell, url, max_size=4) as rig:
        callers = [asyncio.create_task(rig.ask()) for _ in range(8)]
        await until(lambda: rig.now.refill_failures.get("connect", 0) >= 1, "a connect was refused")
        await until(lambda: rig.now.in_flight == 0, "all connects in progress have failed")
        asked = gate.statistics().accepted
        # The shortest pause is a second, and it began later than this.
        await until(lambda: time.monotonic() >= began + 0.9, "the pause is almost over")
        assert gate.statistics().accepted == asked
        gate.limit(None)
        async with asyncio.timeout(LIMIT):
            assert await asyncio.gather(*callers) == [1] * 8
        await rig.full()


@pytest.mark.every_loop
async def test_a_rollback_to_a_server_that_vanished_ends_in_time(
    shell: Shell, gate: Gate, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored.reservoir._upkeep.CLOSE_PATIENCE", 0.2)
    monkeypatch.setattr("moored.reservoir._returns.PING_TIMEOUT", 0.2)
    async with Rig(shell, url, max_size=1, kwargs={}) as rig:
        with pytest.raises(ZeroDivisionError):
            # Without a limit it would take as long as TCP tries.
            await asyncio.wait_for(rig._do(_fail_in_a_transaction, rig, gate), LIMIT)
        assert rig.now.discards == {"bad": 1}
        gate.resume()


def _fail_in_a_transaction(rig: Rig, gate: Gate) -> Any:
    """Raise within a block after the server has vanished."""
    if not isinstance(rig.pool, ConnectionPool):
        return _fail_in_a_transaction_async(rig.pool, gate)
    with rig.pool.connection() as conn:
        conn.execute("begin")
        gate.black_hole()
        raise ZeroDivisionError


async def _fail_in_a_transaction_async(pool: AsyncConnectionPool[Any], gate: Gate) -> None:
    async with pool.connection() as conn:
        await conn.execute("begin")
        gate.black_hole()
        raise ZeroDivisionError


@one_of_all
async def test_idle_connections_dropped_by_a_firewall_are_replaced(
    shell: Shell,
    postgres: SyncEmbeddedPostgres,
    gate: Gate,
    url: str,
) -> None:
    with Gate("127.0.0.1", postgres.port).in_thread() as other:
        ways = [url]
        async with Rig(
            shell, lambda: ways[-1], max_size=6, check_idle=0.05, endpoint=f"net-{shell}"
        ) as rig:
            await rig.full()
            await _let_them_be_idle(rig)
            gate.black_hole()
            ways.append(other.url(postgres.url))
            began = time.monotonic()
            with pytest.raises(PoolTimeout):
                # One who cannot wait that long for a sign of life does not.
                await rig.ask(timeout=0.2)
            assert time.monotonic() - began < 4.5
            assert await rig.ask() == 1
            # Not one after the other: the first that gave no sign of life made the rest suspicious.
            assert time.monotonic() - began < 3 * 5.0
            assert await asyncio.gather(*(rig.ask() for _ in range(12))) == [1] * 12
            await rig.full(births=12)
            assert rig.now.discards == {"failed_check": 6}
            assert rig.now.timeouts == 1
