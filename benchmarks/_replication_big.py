"""Read one very large transaction in a new process, and measure its peak memory.

replication.py runs it as `_replication_big.py URL SLOT ROWS`; it prints the peak in MB.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg

from _replication_data import PUBLICATION, START, Log
from moored.postgres import Postgres, Transaction

__all__ = ["big_txn_rss"]

_SUMS = """
    select count(*), sum(id)::bigint, sum(account)::bigint, sum(amount), sum(length(note))::bigint,
        sum(extract(epoch from at - %s) * 1000000)
    from payments
"""


def big_txn_rss(log: Log) -> float:
    """Run the reader; return its peak memory in MB."""
    with log.copied_slot() as slot:
        command = [sys.executable, str(Path(__file__)), log.url, slot, str(log.rows)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.strip().splitlines()[-1])


async def read(url: str, slot: str, rows: int) -> tuple[Any, ...]:
    """Return a sum for each column of the first transaction."""
    count = ids = accounts = lengths = microseconds = 0
    amounts = Decimal(0)
    with tempfile.TemporaryDirectory() as state:
        postgres = Postgres(
            url,
            pool_size=2,
            state_dir=state,
            slot=slot,
            publication=PUBLICATION,
            manual_publication=True,
        )
        async with postgres as pg, pg.changes("bench") as changes:
            async for txn in changes:
                assert isinstance(txn, Transaction)
                for change in txn:
                    row: Any = change.new
                    count += 1
                    ids += row["id"]
                    accounts += row["account"]
                    amounts += row["amount"]
                    lengths += len(row["note"])
                    since = row["at"] - START
                    microseconds += (since.days * 86_400 + since.seconds) * 1_000_000
                    microseconds += since.microseconds
                await txn.ack()
                if count >= rows:
                    break
    return count, ids, accounts, amounts, lengths, microseconds


def main(url: str, slot: str, rows: int) -> None:
    """Read the transaction, compare its sums with the table's, and print the peak."""
    found = asyncio.run(read(url, slot, rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with psycopg.connect(url) as conn:
        wanted = conn.execute(_SUMS, [START]).fetchone()
    if found != wanted:
        raise SystemExit(f"the consumer found {found} instead of {wanted}")
    print(f"{peak:.1f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
