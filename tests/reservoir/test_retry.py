"""`retry_transaction`: whole transactions, repeated after conflicts."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import Conn, Server, SqlError, pool_of

from moored.reservoir import (
    AsyncConnectionPool,
    ConnectionPool,
    PoolClosed,
    PoolTimeout,
    retry_transaction,
)
from moored.testing import Sim, run_one


class Work:
    """Fails a given number of times, and records the times of its calls."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.times: list[float] = []

    async def __call__(self, conn: Conn) -> str:
        self.times.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    @property
    def waits(self) -> list[float]:
        return [later - one for one, later in pairwise(self.times)]


def conflicts(number: int) -> list[BaseException]:
    return [SqlError("40001", f"conflict {place}") for place in range(number)]


# -- in virtual time -------------------------------------------------------------------------------


@in_virtual_time
async def test_work_that_succeeds_is_done_once(sim: Sim) -> None:
    work = Work()
    async with pool_of() as pool:
        assert await retry_transaction(pool, work) == "done"
    assert len(work.times) == 1


@in_virtual_time
async def test_five_tries_and_the_last_conflict_is_raised(sim: Sim) -> None:
    errors = conflicts(6)
    work = Work(*errors)
    async with pool_of() as pool:
        with pytest.raises(SqlError, match="conflict 4") as caught:
            await retry_transaction(pool, work)
    assert caught.value is errors[4]
    assert len(work.times) == 5


@in_virtual_time
async def test_the_fifth_try_may_succeed(sim: Sim) -> None:
    work = Work(*conflicts(4))
    async with pool_of() as pool:
        assert await retry_transaction(pool, work) == "done"
    assert len(work.times) == 5


def waits_of(number: int, seed: int, **settings: Any) -> list[float]:
    async def scenario(sim: Sim) -> list[float]:
        work = Work(*conflicts(number))
        async with pool_of() as pool:
            await retry_transaction(pool, work, tries=number + 1, **settings)
        return work.waits

    return run_one(scenario, seed, drift=False).result()


def test_waits_from_100_ms_to_5_s_give_or_take_a_quarter() -> None:
    seen: list[list[float]] = []
    for seed in range(20):
        waits = waits_of(8, seed)
        for base, wait in zip([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], waits, strict=True):
            assert 0.75 * base - 1e-6 <= wait < 1.25 * base + 1e-6
        seen.append(waits)
    firsts = [waits[0] for waits in seen]
    assert min(firsts) < 0.09
    assert max(firsts) > 0.11


def test_the_waits_can_be_chosen() -> None:
    assert waits_of(3, 0, start=1.0, max=2.0, jitter=0.0) == pytest.approx([1.0, 2.0, 2.0])


@in_virtual_time
async def test_another_error_is_raised_at_once(sim: Sim) -> None:
    error = SqlError("23505")
    work = Work(*conflicts(1), error)
    async with pool_of() as pool:
        with pytest.raises(SqlError) as caught:
            await retry_transaction(pool, work)
    assert caught.value is error
    assert len(work.times) == 2


@in_virtual_time
async def test_a_raised_error_keeps_its_cause(sim: Sim) -> None:
    cause = SqlError("40001")
    wrapped = [RuntimeError("could not save") for _ in range(2)]
    for error in wrapped:
        error.__cause__ = cause
    async with pool_of() as pool:
        with pytest.raises(RuntimeError, match="could not save") as caught:
            await retry_transaction(pool, Work(*wrapped), tries=2)
    assert caught.value is wrapped[1]
    assert caught.value.__cause__ is cause
    assert "exhausted" not in repr(caught.value.__context__).lower()


@in_virtual_time
async def test_no_connection_is_held_while_it_waits(sim: Sim) -> None:
    work = Work(*conflicts(1))
    async with pool_of() as pool:
        trying = asyncio.create_task(retry_transaction(pool, work, start=5.0))
        await asyncio.sleep(1.0)
        assert pool.statistics().in_use == 0
        assert await trying == "done"


@in_virtual_time
async def test_a_cancelled_caller_does_not_retry(sim: Sim) -> None:
    work = Work(*conflicts(4))
    async with pool_of() as pool:
        trying = asyncio.create_task(retry_transaction(pool, work, start=5.0))
        await asyncio.sleep(1.0)
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying
        assert len(work.times) == 1


@in_virtual_time
async def test_the_errors_of_the_pool_are_raised_unchanged(sim: Sim) -> None:
    server = Server()
    server.takes = 1000.0
    async with pool_of(server) as pool:
        pool.timeout = 3.0
        with pytest.raises(PoolTimeout):
            await retry_transaction(pool, Work())
    with pytest.raises(PoolClosed):
        await retry_transaction(pool, Work())


@pytest.mark.parametrize("tries", [0, -1])
async def test_fewer_than_one_try_is_refused(tries: int) -> None:
    async with pool_of() as pool:
        with pytest.raises(ValueError, match=r"tries=.* must be at least 1"):
            await retry_transaction(pool, Work(), tries=tries)


@in_virtual_time
async def test_a_single_try_never_repeats(sim: Sim) -> None:
    work = Work(*conflicts(1))
    async with pool_of() as pool:
        with pytest.raises(SqlError):
            await retry_transaction(pool, work, tries=1)


# -- for real --------------------------------------------------------------------------------------


@pytest.fixture
def accounts_url(postgres_url: str) -> str:
    """Two accounts that must not be overdrawn together: serializable transactions see to it."""
    with psycopg.connect(postgres_url, autocommit=True) as conn:
        conn.execute("create table account (name text primary key, amount int)")
        conn.execute("insert into account values ('a', 100), ('b', 100)")
    return postgres_url


def amounts(url: str) -> dict[str, int]:
    with psycopg.connect(url) as conn:
        return dict(conn.execute("select name, amount from account").fetchall())


SUM = "select sum(amount) from account"
DRAW = "update account set amount = amount - 150 where name = %s"


async def test_two_conflicting_transactions_on_a_real_server(accounts_url: str) -> None:
    """Both read all, and each writes what the other has read: one of them gets a 40001."""
    tries: dict[str, int] = {"a": 0, "b": 0}
    both_have_read = asyncio.Barrier(2)

    async def configure(conn: psycopg.AsyncConnection[Any]) -> None:
        await conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)

    async def draw(name: str) -> bool:
        async def work(conn: psycopg.AsyncConnection[Any]) -> bool:
            tries[name] += 1
            row = await (await conn.execute(SUM)).fetchone()
            assert row is not None
            if tries[name] == 1:
                await both_have_read.wait()
            if row[0] < 150:
                return False
            await conn.execute(DRAW, [name])
            return True

        return await retry_transaction(pool, work)

    async with AsyncConnectionPool(accounts_url, max_size=2, configure=configure) as pool:
        drawn = await asyncio.gather(draw("a"), draw("b"))
    assert sorted(drawn) == [False, True], "the one that came second saw what the first had done"
    assert sum(amounts(accounts_url).values()) == 50
    assert sorted(tries.values()) == [1, 2]


def test_two_conflicting_transactions_on_a_real_server_in_threads(accounts_url: str) -> None:
    tries: dict[str, int] = {"a": 0, "b": 0}
    drawn: dict[str, bool] = {}
    both_have_read = threading.Barrier(2, timeout=30.0)

    def configure(conn: psycopg.Connection[Any]) -> None:
        conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)

    def draw(name: str) -> None:
        def work(conn: psycopg.Connection[Any]) -> bool:
            tries[name] += 1
            row = conn.execute(SUM).fetchone()
            assert row is not None
            if tries[name] == 1:
                both_have_read.wait()
            if row[0] < 150:
                return False
            conn.execute(DRAW, [name])
            return True

        drawn[name] = retry_transaction(pool, work)

    with ConnectionPool(accounts_url, max_size=2, configure=configure) as pool:
        threads = [threading.Thread(target=draw, args=[name]) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    assert sorted(drawn.values()) == [False, True]
    assert sum(amounts(accounts_url).values()) == 50
    assert sorted(tries.values()) == [1, 2]


def test_a_conflict_that_never_ends_in_threads(accounts_url: str) -> None:
    error = psycopg.errors.SerializationFailure("always")
    tries = []

    def work(conn: psycopg.Connection[Any]) -> None:
        tries.append(conn)
        raise error

    with (
        ConnectionPool(accounts_url, max_size=1) as pool,
        pytest.raises(psycopg.errors.SerializationFailure) as caught,
    ):
        retry_transaction(pool, work, tries=3, start=0.001, max=0.001)
    assert caught.value is error
    assert len(tries) == 3
