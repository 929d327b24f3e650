"""With asyncpg: a password that changes while the pool runs, as the tokens of a cloud do.

A token is fetched ahead of need and kept until it ends. When the server refuses it before that, a
new one is fetched and tried, once.

Expected output:

    hello from app
    orders: the server refused a token (password authentication failed for user "app"): trying …
    hello from app
    <CachedTokens: good for 15 m 0 s, 2 fetched, 0 failed>
    refills: 2, failed: 0, let go: {'drained': 1}
"""

import asyncio
import logging
import sys

import asyncpg

from moored.embedded import EmbeddedPostgres
from moored.reservoir import AsyncConnectionPool, CachedTokens

vault = {"app": "monday"}


async def fetch_token() -> str:
    return vault["app"]  # ask a vault or a cloud here; a function that blocks will do too


async def greet(pool: AsyncConnectionPool[asyncpg.Connection]) -> None:
    async with pool.connection() as conn:
        print("hello from", await conn.fetchval("select current_user"))


async def main() -> None:
    tokens = CachedTokens(fetch_token, lifetime=900)
    async with EmbeddedPostgres() as postgres:
        admin = await asyncpg.connect(postgres.url)
        await admin.execute("create role app login password 'monday'")
        async with AsyncConnectionPool[asyncpg.Connection](
            f"postgresql://app@{postgres.host}:{postgres.port}/postgres",
            connect=asyncpg.connect,
            tokens=tokens,  # each new connection gets the newest as its password
            max_size=1,
            name="orders",
        ) as pool:
            await greet(pool)
            await admin.execute("alter role app password 'tuesday'")
            vault["app"] = "tuesday"
            await pool.drain()  # as if its connection had reached its end
            await greet(pool)
            seen = pool.statistics()
        print(tokens)
        failed = sum(seen.refill_failures.values())
        print(f"refills: {seen.refills}, failed: {failed}, let go: {dict(seen.discards)}")
        await admin.close()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    asyncio.run(main())
