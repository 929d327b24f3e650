"""Publish an event with an order, in one transaction, and handle each event once.

Expected output:

    order 1 was paid
    order 2 was paid
    handled: [1, 2]
"""

from __future__ import annotations

import asyncio

import psycopg

from moored.embedded import EmbeddedPostgres
from moored.postgres import Outbox, Reset


async def pay(outbox: Outbox, conn: psycopg.AsyncConnection, number: int) -> None:
    """Change the data and publish the event: both are committed, or neither."""
    async with conn.transaction():
        await conn.execute("insert into orders values (%s, 'paid')", [number])
        await outbox.publish(conn, "orders", {"id": number, "state": "paid"}, tenant="acme")


async def handle(outbox: Outbox, conn: psycopg.AsyncConnection, count: int) -> None:
    """Write the effect and the cursor in one transaction, so that a crash repeats nothing."""
    async with outbox.consume("mailer", channels=["orders"]) as events:
        async for event in events:
            if isinstance(event, Reset):  # restored from a backup, or behind the retention
                raise SystemExit(event.reason)
            order = event.json()
            async with conn.transaction():
                await conn.execute("insert into mails values (%s)", [order["id"]])
                await event.ack(conn)
            print(f"order {order['id']} was {order['state']}")
            count -= 1
            if not count:
                return


async def main() -> None:
    async with (
        EmbeddedPostgres() as server,
        Outbox(server.url, install=True) as outbox,
        await psycopg.AsyncConnection.connect(server.url, autocommit=True) as conn,
    ):
        await conn.execute("create table orders (id int, state text)")
        await conn.execute("create table mails (id int)")
        await pay(outbox, conn, 1)
        await pay(outbox, conn, 2)
        await handle(outbox, conn, 2)
        mails = await (await conn.execute("select id from mails order by id")).fetchall()
        print("handled:", [number for (number,) in mails])


if __name__ == "__main__":
    asyncio.run(main())
