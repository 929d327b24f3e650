"""Follow a table: every committed change, in order, none lost.

It starts an embedded PostgreSQL; to follow your own database, pass its URL to `Postgres`.

Expected output:

    insert into orders: {'id': 1, 'item': 'tea'}
    update of orders: {'id': 1, 'item': 'green tea'}
    delete from orders: {'id': 1}
"""

from __future__ import annotations

import asyncio
import tempfile

from moored.embedded import EmbeddedPostgres
from moored.postgres import Delete, Insert, Postgres, Transaction, Update

STATEMENTS = (
    "insert into orders values (1, 'tea')",
    "update orders set item = 'green tea'",
    "delete from orders",
)


async def follow(pg: Postgres) -> None:
    seen = 0
    async for txn in pg.changes(consumer="example", tables=["orders"]):
        assert isinstance(txn, Transaction)
        for change in txn:
            match change:
                case Insert(table, row):
                    print(f"insert into {table}: {row}")
                case Update(table, _, row):
                    print(f"update of {table}: {row}")
                case Delete(table, key):
                    print(f"delete from {table}: {key}")
        await txn.ack()  # now PostgreSQL may remove the WAL
        seen += 1
        if seen == len(STATEMENTS):
            return


async def main() -> None:
    with tempfile.TemporaryDirectory() as state:
        async with EmbeddedPostgres() as server, Postgres(server.url, state_dir=state) as pg:
            async with pg.connection() as conn:
                await conn.execute("create table orders (id int primary key, item text)")
            following = asyncio.create_task(follow(pg))
            await pg.wait_until_published("orders")
            for statement in STATEMENTS:
                async with pg.connection() as conn:
                    await conn.execute(statement.encode())
            await following


if __name__ == "__main__":
    asyncio.run(main())
