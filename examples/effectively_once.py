"""Apply each transaction once, although the consumer crashes before it acknowledges.

The effect (a running total) and the position are stored in one transaction of the consumer's own
database. After the crash the consumer passes the stored position as `start=`.

Expected output:

    added 10, total 10, then crashed before the acknowledgement
    added 5, total 15
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from moored.embedded import EmbeddedPostgres
from moored.postgres import Postgres, Transaction


def apply(ledger: sqlite3.Connection, txn: Transaction) -> tuple[int, int]:
    """Store the effect and the position in one transaction."""
    amount = sum(change.new["amount"] for change in txn if change.new)
    with ledger:
        ledger.execute("update totals set total = total + ?", (amount,))
        ledger.execute("update progress set position = ?", (str(txn.position),))
    (total,) = ledger.execute("select total from totals").fetchone()
    return amount, total


async def consume(pg: Postgres, ledger: sqlite3.Connection, *, crash: bool) -> None:
    (start,) = ledger.execute("select position from progress").fetchone()
    async with pg.changes("ledger", tables=["payments"], start=start) as changes:
        await pg.wait_until_published("payments")
        if start is None:
            async with pg.connection() as conn:
                await conn.execute("insert into payments values (1, 10)")
        txn = await anext(changes)
        assert isinstance(txn, Transaction)
        amount, total = apply(ledger, txn)
        if crash:
            print(f"added {amount}, total {total}, then crashed before the acknowledgement")
            return
        print(f"added {amount}, total {total}")
        await txn.ack()
        assert txn.acknowledged


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = sqlite3.connect(Path(folder) / "ledger.db")
        ledger.executescript(
            "create table totals (total int); insert into totals values (0);"
            "create table progress (position text); insert into progress values (null);"
        )
        async with EmbeddedPostgres() as server:
            async with Postgres(server.url, state_dir=folder) as pg:
                async with pg.connection() as conn:
                    await conn.execute("create table payments (id int primary key, amount int)")
                await consume(pg, ledger, crash=True)
            async with Postgres(server.url, state_dir=folder) as pg:
                async with pg.connection() as conn:
                    await conn.execute("insert into payments values (2, 5)")
                await consume(pg, ledger, crash=False)
        ledger.close()


if __name__ == "__main__":
    asyncio.run(main())
