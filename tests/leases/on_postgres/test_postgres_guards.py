"""A store in Postgres that is closed while a call is under way."""

from __future__ import annotations

import asyncio

from tests.leases.on_postgres.support import Database, rows

from moored.kernel import Clock
from moored.leases.postgres import open_store

OTHERS = """select query from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()"""


async def test_a_connection_that_is_in_use_when_the_store_is_closed_is_closed_after_it(
    postgres_url: str, database: Database
) -> None:
    store = open_store(postgres_url, clock=Clock.current())
    await store.open()
    call = asyncio.create_task(store._link.run(b"select pg_sleep(1)"))
    async with asyncio.timeout(30.0):
        while not any("pg_sleep" in query for (query,) in rows(database, OTHERS)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await store.close()
        await call
        while rows(database, OTHERS):  # noqa: ASYNC110 - the server ends it a little later
            await asyncio.sleep(0.01)
