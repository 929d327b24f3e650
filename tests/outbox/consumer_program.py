"""A consumer in a process of its own, which a test kills: writes each event into a table.

Arguments: the URL, and "after" to acknowledge after the commit of the effect, or "with" to
acknowledge within the same transaction.
"""

from __future__ import annotations

import asyncio
import sys

import psycopg

from moored.postgres import Reset
from moored.postgres.outbox import Outbox


async def main(url: str, way: str) -> None:
    async with (
        Outbox(url, retain=None) as outbox,
        await psycopg.AsyncConnection.connect(url) as conn,
        outbox.consume(way) as events,
    ):
        async for event in events:
            assert not isinstance(event, Reset), event
            async with conn.transaction():
                await conn.execute("insert into effects values (%s, %s)", [way, event.payload])
                if way == "with":
                    await event.ack(conn)
            if way == "after":
                await event.ack()


asyncio.run(main(*sys.argv[1:]))
