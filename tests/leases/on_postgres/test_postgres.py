"""The store in Postgres, against a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import sql
from tests.leases.conformance import OpenStore, StoreConformance, opening, request
from tests.leases.on_postgres.support import Database, rows, swept

from moored.embedded import SyncEmbeddedPostgres
from moored.kernel import Clock
from moored.leases import StoreUnavailable
from moored.leases.postgres import PostgresStore, grants
from moored.leases.postgres import open_store as open_postgres

_numbers = itertools.count(1)


class TestPostgres(StoreConformance):
    @pytest.fixture
    async def open_store(self, postgres: SyncEmbeddedPostgres) -> AsyncIterator[OpenStore]:
        # A schema is an empty place too, and is made in a tenth of the time of a database.
        url = f"{postgres.url}?schema=test_{next(_numbers)}"
        async with opening(lambda: open_postgres(url, clock=Clock.current())) as opened:
            yield opened


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_the_limit_holds_with_any_default_isolation_level(
    role: str, store: PostgresStore, database: Database, level: str
) -> None:
    name = sql.Identifier(f"app_{database.info.dbname}")
    database.execute(grants(f"app_{database.info.dbname}").encode())
    setting = sql.SQL("alter role {} set default_transaction_isolation = {}")
    database.execute(setting.format(name, sql.Literal(level)))
    stores = [open_postgres(role, clock=Clock.current()) for _ in range(4)]
    asked = [stores[n % 4].acquire(request(limit=10)) for n in range(20)]
    assert sum(grant is not None for grant in await asyncio.gather(*asked)) == 10
    for each in stores:
        await each.close()


async def test_an_acquire_waits_for_a_concurrent_one_of_the_same_key(
    store: PostgresStore, postgres_url: str
) -> None:
    given = {"key": "db", "id": "theirs", "limit": 1, "ttl": 60.0, "timeout_ms": "0"}
    holder = {"service_name": "s", "owner": "o", "host": "h", "pid": 1}
    with psycopg.connect(postgres_url, cursor_factory=psycopg.ClientCursor) as other:
        other.execute(store._sql.acquire, {**given, **holder})
        asked = asyncio.ensure_future(store.acquire(request("db")))
        await asyncio.sleep(0.2)
        assert not asked.done()
        other.commit()
    assert await asked is None
    assert [held.id for held in await store.held("db")] == ["theirs"]


async def test_renewals_and_releases_in_any_order_do_not_deadlock(
    postgres_url: str,
) -> None:
    stores = [open_postgres(postgres_url, clock=Clock.current()) for _ in range(3)]
    wanted = [request(f"db/{n % 3}", limit=60) for n in range(60)]
    for each in wanted:
        await stores[0].acquire(each)
    for turn in range(5):
        answers = await asyncio.gather(
            stores[0].renew(wanted),
            stores[1].renew(wanted[::-1]),
            stores[2].release(wanted[turn * 10 : turn * 10 + 10][::-1]),
        )
        assert list(answers[2]) == [True] * 10
    for each_store in stores:
        await each_store.close()


async def test_a_call_that_waits_for_a_lock_times_out(
    far_store: PostgresStore, database: Database
) -> None:
    with database.transaction():
        lock = "select pg_advisory_xact_lock(hashtextextended('moored.leases/moored/db', 0))"
        database.execute(lock)
        with pytest.raises(StoreUnavailable, match=r"57014|did not answer"):
            await far_store.acquire(request("db"))
        # The statement stops waiting in the server: it must not acquire a lease later.
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        async with asyncio.timeout(30):
            while rows(database, waiting) != [(0,)]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    assert await far_store.acquire(request("db")) is not None


async def test_a_clock_that_was_set_back_does_not_block_a_rate_limit(
    store: PostgresStore, database: Database
) -> None:
    await store.take("connects", rate=2.0, burst=4, tokens=4)
    # An hour ahead is what an hour back looks like.
    database.execute("update moored.rates set full_at = full_at + 3600 * 1000000::bigint")
    granted, wait = await store.take("connects", rate=2.0, burst=4, tokens=4)
    assert granted == 0
    assert 0 < wait <= 0.5
    await asyncio.sleep(wait)
    assert (await store.take("connects", rate=2.0, burst=4, tokens=4)).granted >= 1


async def test_a_clock_that_was_set_back_does_not_prolong_a_lease(
    store: PostgresStore, database: Database
) -> None:
    await store.acquire(request("db", ttl=0.2))
    database.execute("update moored.leases set expires = expires + interval '1 hour'")
    assert await store.acquire(request("db", ttl=0.2)) is None
    await asyncio.sleep(0.25)
    assert await store.acquire(request("db", ttl=0.2)) is not None


async def test_the_fence_grows_when_the_last_one_is_lost(
    store: PostgresStore, database: Database
) -> None:
    first = await store.acquire(request("db", limit=2))
    database.execute("delete from moored.fences")
    second = await store.acquire(request("db", limit=2))
    assert first is not None
    assert second is not None
    assert second.fence > first.fence


async def test_the_fence_grows_when_the_clock_was_set_back(
    store: PostgresStore, database: Database
) -> None:
    await store.acquire(request("db", limit=2))
    query = "update moored.fences set fence = fence + 3600 * 1000000::bigint returning fence"
    ((ahead,),) = rows(database, query)
    second = await store.acquire(request("db", limit=2))
    assert second is not None
    assert second.fence == ahead + 1


@pytest.mark.parametrize("rate", [0.3, 3.0, 7.7, 300.0, 999.0, 30_000.0])
async def test_a_full_limit_gives_exactly_its_burst(store: PostgresStore, rate: float) -> None:
    # Costs are not whole microseconds here: rounding must neither give a token nor keep one.
    assert (await store.take("odd", rate=rate, burst=7, tokens=1000)).granted == 7
    await asyncio.sleep(7 / rate if rate > 100 else 0)
    granted, wait = await store.take("odd", rate=rate, burst=7, tokens=1000)
    assert granted == (7 if rate > 100 else 0)
    assert 0 < wait <= 1 / rate + 1e-6


async def test_a_take_that_waited_for_the_row_lock_keeps_the_rate(
    store: PostgresStore, database: Database
) -> None:
    await store.take("connects", rate=0.1, burst=5, tokens=1)
    with database.transaction():
        # Other callers were quicker: when the row is free again, the limit is empty, as of later
        # than the moment at which this one asked.
        database.execute("select from moored.rates for update")
        asked = asyncio.ensure_future(store.take("connects", rate=0.1, burst=5, tokens=1))
        await asyncio.sleep(0.5)
        database.execute(
            "update moored.rates set full_at = "
            "(extract(epoch from clock_timestamp()) * 1000000)::bigint + 50000000"
        )
    ((before,),) = rows(database, "select full_at from moored.rates")
    granted, wait = await asked
    assert granted == 0
    assert 0 < wait <= 10
    ((after,),) = rows(database, "select full_at from moored.rates")
    assert after == before


async def test_expired_leases_of_a_key_are_deleted_by_the_next_call(
    store: PostgresStore, database: Database
) -> None:
    for _ in range(3):
        await store.acquire(request("db", limit=5, ttl=0.05))
    await asyncio.sleep(0.1)
    await store.acquire(request("db", limit=5))
    assert rows(database, "select count(*) from moored.leases") == [(1,)]


async def test_expired_rows_of_unused_keys_are_swept(
    store: PostgresStore, database: Database
) -> None:
    kept = request("kept", limit=9)
    await store.acquire(kept)
    await store.take("kept", rate=0.001, burst=1, tokens=1)
    for n in range(5):
        await store.acquire(request(f"old/{n}"))
        await store.take(f"old/{n}", rate=1000.0, burst=1, tokens=1)
    database.execute(
        "update moored.leases set expires = expires - interval '1 hour' where key like 'old/%'"
    )
    database.execute(
        "update moored.fences set given = given - interval '8 days' where key like 'old/%'"
    )
    database.execute(
        "update moored.rates set full_at = full_at - 61 * 1000000 where key like 'old/%'"
    )
    await store.renew([kept])
    await swept(store)
    for table in ("leases", "fences", "rates"):
        query = sql.SQL("select key from moored.{}").format(sql.Identifier(table))
        assert database.execute(query).fetchall() == [("kept",)], table


async def test_sweeps_are_rare(store: PostgresStore, database: Database) -> None:
    kept = request("kept", limit=9)
    await store.acquire(kept)
    await store.renew([kept])
    await swept(store)
    await store.acquire(request("old"))
    database.execute(
        "update moored.leases set expires = expires - interval '1 hour' where key = 'old'"
    )
    await store.renew([kept])
    await swept(store)
    assert rows(database, "select count(*) from moored.leases") == [(2,)]


async def test_many_calls_share_few_connections(postgres_url: str, database: Database) -> None:
    store = open_postgres(f"{postgres_url}?connections=2", clock=Clock.current())
    await asyncio.gather(*(store.acquire(request(f"db/{n}")) for n in range(30)))
    query = "select count(*) from pg_stat_activity where application_name = 'moored leases'"
    assert rows(database, query + " and datname = current_database()") == [(2,)]
    await store.close()
