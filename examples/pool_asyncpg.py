"""A pool of asyncpg connections whose password changes, as the tokens of a cloud do.

A token is fetched before it is needed, and cached until it expires. If the server refuses a cached
token, a new one is fetched and tried once.

Expected output:

    hello from app
    orders: the server rejected a token (password authentication failed for user "app"): trying …
    hello from app
    <CachedTokens: valid for 15 m 0 s, 2 fetched, 0 failed>
    refills: 2, failed: 0, discarded: {'drained': 1}
"""

import asyncio
import logging
import sys

import asyncpg

from moored.embedded import EmbeddedPostgres
from moored.reservoir import AsyncConnectionPool, CachedTokens

vault = {"app": "monday"}


async def fetch_token() -> str:
    return vault["app"]  # query a vault or a cloud here; the function may also block


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
            tokens=tokens,  # the password of each new connection
            max_size=1,
            name="orders",
        ) as pool:
            await greet(pool)
            await admin.execute("alter role app password 'tuesday'")
            vault["app"] = "tuesday"
            await pool.drain()  # as if its connection had expired
            await greet(pool)
            seen = pool.statistics()
        print(tokens)
        failed = sum(seen.refill_failures.values())
        print(f"refills: {seen.refills}, failed: {failed}, discarded: {dict(seen.discards)}")
        await admin.close()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    asyncio.run(main())
