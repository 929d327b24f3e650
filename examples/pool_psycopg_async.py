"""A pool under load whose connections expire after one second, without any error for callers.

Five connections are opened together, on a server that allows ten new ones per second. They are
replaced one by one, each before it expires, so that from then on they never expire together.

Expected output:

    <AsyncConnectionPool 127.0.0.1:…/postgres: 5 of 5, 5 ready, 0 in use, 0 waiting, next …>
    300 queries, 0 errors
    all connections changed at least once: True
    some were replaced before they expired: True
"""

import asyncio

from moored.embedded import EmbeddedPostgres
from moored.reservoir import AsyncConnectionPool


async def work(pool: AsyncConnectionPool, errors: list[Exception]) -> None:
    for _ in range(100):
        try:
            async with pool.connection(timeout=5) as conn:  # commits, or rolls back
                await conn.execute("select pg_sleep(0.01)")
        except Exception as error:
            errors.append(error)
        await asyncio.sleep(0.01)


async def main() -> None:
    errors: list[Exception] = []
    async with (
        EmbeddedPostgres() as postgres,
        AsyncConnectionPool(postgres.url, max_size=5, max_lifetime=1.0, creation_rate=10) as pool,
    ):
        await pool.wait()  # for all five; otherwise the first callers wait
        print(pool)
        await asyncio.gather(*(work(pool, errors) for _ in range(3)))
        seen = pool.statistics()
        print(f"{seen.checkouts} queries, {len(errors)} errors")
        print("all connections changed at least once:", seen.refills >= 10)
        print("some were replaced before they expired:", seen.discards["replaced_ahead"] > 0)


if __name__ == "__main__":
    asyncio.run(main())
