"""An instance in its own process, for recovery.py to kill: prints a line when it streams."""

from __future__ import annotations

import asyncio
import sys

from moored.postgres import Postgres, Transaction

CONSUMER = "bench"
TABLE = "changes"


async def follow(url: str, state_dir: str) -> None:
    """Acknowledge every transaction; print "active" when the stream works."""
    async with Postgres(url, state_dir=state_dir, pool_size=2) as pg:
        changes = pg.changes(CONSUMER, tables=[TABLE])
        await pg.wait_until_published(TABLE)
        print("active", flush=True)
        async for item in changes:
            if isinstance(item, Transaction):
                await item.ack()


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], sys.argv[2]))
